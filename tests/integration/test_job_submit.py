"""`ray job submit` from a clean directory to a cluster that does not know the project."""

import json
import re
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ray
from heads import Head, environment
from ray.job_submission import JobSubmissionClient
from running import SMALL, wait_until
from transformers import AutoModelForCausalLM

from rtpo_ray.ledger import Ledger

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dashboard():
    """(address of the dashboard, temporary folder) of a head node of our own."""
    with Head() as head:
        yield head.dashboard, head.scratch


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory):
    """The project's files as a fresh clone of the working tree would have them."""
    target = tmp_path_factory.mktemp("clean")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run(command, folder, **variables):
    """(exit code, everything it printed)."""
    done = subprocess.run(command, cwd=folder, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    return done.returncode, done.stdout


def rtpo(folder, *words, **variables):
    return run([sys.executable, "-m", "rtpo_ray", *words], folder, **variables)


def published(scratch):
    """What the nodes of the cluster show to Prometheus."""
    found = json.loads((scratch / "prom_metrics_service_discovery.json").read_text())
    texts = []
    for target in (target for entry in found for target in entry["targets"]):
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as response:
                texts.append(response.read().decode())
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            continue  # a port that is not open yet
    return "\n".join(texts)


def test_a_job_is_submitted_watched_stopped_and_goes_on_when_submitted_again(dashboard, clean_copy, tiny_model, tmp_path):
    address, scratch = dashboard
    folder = tmp_path / "job"
    words = ["submit", "--address", address, "--config", "conf/quickstart.yaml", *tiny_model[0], "run.name=job", f"run.root={tmp_path}",
             "run.resume=true"]
    code, output = rtpo(clean_copy, *words, "run.sweeps=1000", "--no-wait")
    assert code == 0, output
    job = re.search(r"job (\S+): run job; rtpo stop", output).group(1)

    def begun():
        return (folder / "metrics.jsonl").exists() and '"kind": "sweep"' in (folder / "metrics.jsonl").read_text()

    wait_until(begun, 200, "the first sweep of the job")
    code, output = rtpo(clean_copy, "status", "--address", address, str(folder))
    assert code == 0 and "sweep 2 under way" in output, output
    for shown in ("Coordinator(rtpo, job on {})", "GeneratorPool(2 to 2 on {})", "Generator(rtpo-generator-0 on {})",
                  "Generator(rtpo-generator-1 on {})", "LearnerRank(0 of 1 on {})"):
        assert shown.format(ray.util.get_node_ip_address()) in output, output
    for expected in (r'ray_rtpo_success\{[^}]*kind="stage"[^}]*run="job"[^}]*turn="0"', r"ray_rtpo_generated_tokens_total\{[^}]*\} [1-9]",
                     r'ray_rtpo_generators\{[^}]*run="job"[^}]*state="serving"[^}]*\} 2\.0',
                     r'ray_rtpo_generator_weight_version\{[^}]*generator="rtpo-generator-1"[^}]*\} [1-9]'):
        wait_until(lambda pattern=expected: re.search(pattern, published(scratch)), 60, f"{expected} among the published metrics")
    (info,) = [info for info in JobSubmissionClient(address).list_jobs() if info.submission_id == job]
    assert info.metadata["run"] == "job" and len(info.metadata["config"]) == 12

    code, output = rtpo(clean_copy, "stop", "--address", address, job)
    assert (code, output.strip().splitlines()[-1]) == (0, f"job {job} is stopped"), output
    before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with Ledger(folder) as ledger:
        at = ledger.progress
    assert at.sweep >= 1 and not at.finished

    code, output = rtpo(clean_copy, *words, f"run.sweeps={at.sweep + 1}")
    assert code == 0, output
    assert "RESUMED at sweep " in output and f"sweep {at.sweep + 1}/{at.sweep + 1}  trunks " in output and "run finished: " in output
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert events[0] == before[0] and [event["sweep"] for event in events if event["kind"] == "sweep"] == list(range(at.sweep + 1))
    assert AutoModelForCausalLM.from_pretrained(folder / "final").num_parameters() > 1e5


def test_a_broken_configuration_fails_the_job_with_its_message(dashboard, clean_copy, tmp_path):
    command = ["ray", "job", "submit", "--address", dashboard[0], "--working-dir", ".", "--", "python", "-m", "rtpo_ray", "train",
               "--config", "conf/quickstart.yaml", *SMALL, "algorithm.args.n_siblings=1", f"run.root={tmp_path}"]
    code, output = run(command, clean_copy)
    assert code == 1, output
    assert "rtpo: configuration error: field algorithm.args.n_siblings is 1; expected at least 2 (one sibling is its own baseline" in output
    assert "Traceback" not in output and list(tmp_path.iterdir()) == []


def test_a_cluster_that_asks_for_a_token(clean_copy, tiny_model, tmp_path):
    guard = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with Head(**guard) as head:
        words = ["submit", "--address", head.dashboard, "--config", "conf/quickstart.yaml", *tiny_model[0], "run.name=guarded",
                 f"run.root={tmp_path}", "run.sweeps=1", "run.eval_tasks=0", "generators.min=1"]
        code, output = rtpo(clean_copy, *words)
        assert code == 1 and "token" in output and "Traceback" not in output and list(tmp_path.iterdir()) == [], output
        code, output = rtpo(clean_copy, *words, **guard)
        assert code == 0 and "run finished: " in output, output
        status = ["status", "--address", head.dashboard, str(tmp_path / "guarded")]
        code, output = rtpo(clean_copy, *status, **guard)
        assert code == 0 and output.startswith("finished"), output
        code, output = rtpo(clean_copy, *status, **guard | {"RAY_AUTH_TOKEN": "0" * 64})
        assert code == 1 and "token" in output and "Traceback" not in output, output
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(guard["RAY_AUTH_TOKEN"].encode() in content for content in written)
