"""The `rtpo` command as a user runs it: a process of its own, on a local cluster of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aim import Repo
from omegaconf import OmegaConf
from running import wait_for_end
from transformers import AutoModelForCausalLM

from rtpo_ray.config import load_config

ROOT = Path(__file__).parents[2]
FILES = {"config.yaml", "metrics.jsonl", "ledger.sqlite", "final", "timeline", "states", "trunks", "aim-run", ".lock"}


def events(folder):
    """Lines of metrics.jsonl, each of them complete."""
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def aim_run(root):
    """The one Aim run under `root`: (run, {(metric, context as JSON): values}). Aim's index is behind until its UI runs, or this."""
    aim = Path(sys.executable).parent / "aim"
    subprocess.run([aim, "storage", "--repo", str(root), "reindex", "-y"], check=True, capture_output=True, timeout=60)
    repo = Repo.from_path(str(root))
    (found,) = repo.iter_runs()
    return found, {(metric.name, json.dumps(metric.context.to_dict(), sort_keys=True)): list(metric.values.sparse_list()[1])
                   for metric in found.metrics()}


def test_train_then_evaluate(start, tmp_path):
    training = start(["train"], "run.sweeps=1", "run.name=whole", "generators.min=1")
    assert training.finish(240) == 0, training.text
    folder = tmp_path / "whole"
    assert {path.name for path in folder.iterdir()} == FILES
    kept = load_config(folder / "config.yaml")
    assert (kept.run.name, kept.run.sweeps, kept.algorithm.args["n_siblings"]) == ("whole", 1, 4)

    rows = events(folder)
    assert [row["kind"] for row in rows if row["kind"] != "stage"] == ["eval", "sweep", "eval"]
    shown = [line for line in training.lines if line.startswith(("  turn ", "sweep ", "eval "))]
    assert len(shown) == len(rows)  # one line an event
    assert any(line.startswith("sweep 1/1  trunks ") for line in shown) and f"run finished: {folder}" in training.lines[-1]

    run, metrics = aim_run(tmp_path)
    assert run["status"] == "finished" and run.end_time is not None
    assert run["config"] == OmegaConf.to_container(OmegaConf.structured(kept))
    stage = next(row for row in rows if row["kind"] == "stage")
    context = json.dumps({"kind": "stage", "turn": stage["turn"]}, sort_keys=True)
    assert metrics["siblings", context] == [stage["siblings"]] and metrics["seconds.total", context] == [stage["seconds"]["total"]]
    assert metrics["success", '{"kind": "eval"}'] == [row["success"] for row in rows if row["kind"] == "eval"]

    assert AutoModelForCausalLM.from_pretrained(folder / "final").num_parameters() > 1e5
    (tmp_path / "whole.yaml").write_text((folder / "config.yaml").read_text())
    evaluation = start(["evaluate", "--model", str(folder / "final"), "--config", str(tmp_path / "whole.yaml")], "generators.min=1",
                       "run.eval_samples=2")
    assert evaluation.finish(180) == 0, evaluation.text
    again, last = json.loads(evaluation.lines[-1]), rows[-1]
    assert any(line.startswith("eval after 0 sweeps: success ") for line in evaluation.lines)
    assert any(line.startswith(f"  pass@2  {100 * again['pass_at_k']:.1f} % (95 % interval ") for line in evaluation.lines)
    assert again["samples"] == 2 and again["success"] <= again["pass_at_k"] <= 1
    # The weights that the run ended with, so greedy decoding does the same; sampling uses the seeds of the evaluation after 0 sweeps.
    assert {key: again[key] for key in ("kind", "tasks", "failed")} == {"kind": "eval", "tasks": 16, "failed": {}}
    assert again["success_greedy"] == pytest.approx(last["success_greedy"], abs=1 / 16)
    assert {path.name for path in folder.iterdir()} == FILES


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_cleanly(start, tmp_path, stop, code):
    training = start(["train"], "run.sweeps=1000", "run.name=stopped", "run.eval_tasks=0", "generators.min=1")
    training.wait_for("  turn ", 180)
    family = training.family()
    assert any("raylet" in one.name() for one in family) and len(family) > 6
    if stop == signal.SIGINT:
        os.killpg(training.process.pid, stop)  # a terminal tells the whole foreground group
    else:
        training.process.send_signal(stop)
    asked = time.monotonic()
    assert training.finish(60) == code, training.text
    assert f"interrupted: {tmp_path / 'stopped'} holds what is done so far" in training.text and "Traceback" not in training.text
    left = wait_for_end(family, 30)
    assert left == [], f"{time.monotonic() - asked:.0f} s after {stop!r}: {left}"

    rows = events(tmp_path / "stopped")
    assert rows and rows[0]["kind"] == "stage"
    run, metrics = aim_run(tmp_path)
    assert run["status"] == "interrupted" and run.end_time is not None
    first = json.dumps({"kind": "stage", "turn": rows[0]["turn"]}, sort_keys=True)
    assert metrics["siblings", first][0] == rows[0]["siblings"]


@pytest.mark.parametrize(("override", "message"), [
    ("algorithm.args.n_siblings=1", "field algorithm.args.n_siblings is 1; expected at least 2"),
    ("learner.ranks=9", "field learner.ranks is 9 (x 0.5 CPUs)"),
    ("algorithm.name=grp", "field algorithm.name is 'grp'; valid choices: rtpo"),
])
def test_a_bad_configuration_starts_nothing(start, tmp_path, override, message):
    training = start(["train"], "run.name=bad", override)
    assert training.finish(60) == 2
    assert f"rtpo: configuration error: {message}" in training.text and "Traceback" not in training.text
    assert not (tmp_path / "bad").exists()
