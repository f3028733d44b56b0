"""Two programs that train in turns on one machine, so that their steps can be compared: A B A B ..., each idle while the other works.

A side is a process that reads lines `{"steps": n}` and answers each with one line `SIDE {"seconds": .., "steps": [..]}` once so many steps are done;
it ends with its input. This file is also our own side, a run as `rtpo train` makes it, whose coordinator lives in this process:

    python tests/bench/sides.py MODEL FOLDER [FILE.yaml ...] [field=value ...]
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
MARK = "SIDE "
PATIENCE = 600.0  # seconds for one side's answer, its start included
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
         "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
PHASES = ("generate", "credit", "learn", "broadcast", "other")


class Side:
    """One of the two programs.

    Args:
    name: for messages.
    argv: how it is started.
    variables: of its environment, beside this process's.
    log: file for all that it prints.
    """

    def __init__(self, name: str, argv: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.name, self._log, self._answers = name, log, list[dict[str, Any]]()
        self._more, self._ended = threading.Condition(), False
        with log.open("w") as errors:
            self._process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, text=True,
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if line.startswith(MARK):
                    with self._more:
                        self._answers.append(json.loads(line[len(MARK):]))
                        self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def steps(self, count: int, patience: float) -> dict[str, Any]:
        """Have it do so many. Raises RuntimeError when it ends or is silent for `patience` seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: said below, with what its log says
            self._process.stdin.write(json.dumps({"steps": count}) + "\n")
            self._process.stdin.flush()
        with self._more:
            self._more.wait_for(lambda: bool(self._answers) or self._ended, patience)
            if not self._answers:
                if self._ended:  # its output is at an end, and so is it
                    self._process.wait(30)
                tail = "\n".join(self._log.read_text().splitlines()[-15:])
                raise RuntimeError(f"{self.name}: no answer to {count} steps within {patience:g} s (exit code {self._process.poll()}); "
                                   f"its log {self._log} ends with\n{tail}")
            return self._answers.pop(0)

    def measured(self, count: int, patience: float) -> dict[str, Any]:
        """`steps`, and the CPU seconds a step of this process and all below it, by what they are called."""
        before = self._cpu()
        answer = self.steps(count, patience)
        spent: dict[str, float] = {}
        for process, (name, seconds) in self._cpu().items():
            spent[name] = spent.get(name, 0.0) + (seconds - before.get(process, ("", 0.0))[1]) / count
        return {**answer, "cpu": spent}

    def _cpu(self) -> dict[int, tuple[str, float]]:
        """Name and CPU seconds of every process of this side that still lives."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for one in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times, word = one.cpu_times(), (one.cmdline() or [one.name()])[0]
                    found[one.pid] = (word if word.startswith("ray::") else Path(word).name, times.user + times.system)
        return found

    def close(self) -> None:
        """End it; asked first, since its actors go with it."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)


def our_sweeps(model: Path, scratch: Path, given: Sequence[str], name: str = "rtpo-ray") -> Side:
    """A run of ours; its files are in a folder of its own under `scratch`."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    return Side(name, [sys.executable, str(Path(__file__)), str(model), str(folder / "run"), *given],
                {**QUIET, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}, folder / "log")


def take_turns(sides: Sequence[Side], steps: int, pairs: int) -> list[list[dict[str, Any]]]:
    """Answers by side, after one to warm up."""
    try:
        found: list[list[dict[str, Any]]] = [[] for _ in sides]
        for number in range(pairs + 1):
            for side, kept in zip(sides, found, strict=True):
                answer = side.measured(max(steps, 2) if number == 0 else steps, PATIENCE)
                if number:
                    kept.append(answer)
        return found
    finally:
        for side in sides:
            side.close()


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one side's answers."""
    steps = [step for answer in found for step in answer["steps"]]
    seconds, tokens = statistics.median(answer["seconds"] for answer in found), statistics.mean(step["generated_tokens"] for step in steps)
    kept = {"seconds_a_step": seconds, "generated_tokens_a_step": tokens, "generated_tokens_a_second": tokens / seconds,
            "success": statistics.mean(step["success"] for step in steps),
            "each": [round(answer["seconds"], 4) for answer in found], "cpu_seconds_a_step": statistics.median(sum(a["cpu"].values()) for a in found),
            "cpu_by_process": {name: round(statistics.median(a["cpu"].get(name, 0.0) for a in found), 4) for name in sorted(found[-1]["cpu"])
                               if statistics.median(a["cpu"].get(name, 0.0) for a in found) > 0.002}}
    if "phases" in steps[0]:
        kept["phases"] = {phase: statistics.median(step["phases"][phase] for step in steps) for phase in PHASES}
        kept |= {f"{key}_a_step": statistics.mean(step[key] for step in steps) for key in ("trained_tokens", "learner_tokens", "failed")}
    return kept


def answers(count: int, seconds: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """The line of `count` steps that took `seconds` together."""
    return MARK + json.dumps({"seconds": seconds / count, "steps": list(steps)})


def requests() -> Iterator[int]:
    """How many steps are asked for, until the input ends."""
    for line in sys.stdin:
        yield int(json.loads(line)["steps"])


def sweeps(model: str, folder: str, given: Sequence[str]) -> None:
    """Our side: a step is a sweep. `given`: files of configuration and overrides."""
    from actors.cluster import build_coordinator, connect
    from rtpo_ray.config import load_config

    files = [word for word in given if word.endswith(".yaml")]
    config = load_config(files, [*(word for word in given if word not in files), "run.sweeps=1000000", "run.tokens=0", "run.eval_tasks=0",
                                 "run.aim=false", f"model.path={model}"])
    with connect(config):
        Path(folder).mkdir(parents=True)
        events = build_coordinator(config, model).run(folder)
        for count in requests():
            started, done = time.perf_counter(), list[dict[str, Any]]()
            stages: list[dict[str, Any]] = []
            while len(done) < count:
                event = next(events)
                if event["kind"] == "stage":
                    stages.append(event)
                elif event["kind"] == "sweep":
                    done.append(step_of(event, stages))
                    stages = []
                else:
                    raise RuntimeError(f"expected stages and sweeps only, got {event}")
            print(answers(count, time.perf_counter() - started, done), flush=True)


def write(name: str, what: str | None, figures: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> None:
    """The results of a bench as results/NAME.json."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    text = json.dumps({"what": (what or "").strip().splitlines()[0], "commit": commit, "date": time.strftime("%Y-%m-%d"), "figures": figures,
                       "targets": list(targets)}, indent=1)
    (Path(__file__).parent / "results" / f"{name}.json").write_text(text + "\n")


def step_of(sweep: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a sweep and its stages amount to: tokens, rollouts, seconds by phase."""
    return {"seconds": sweep["seconds"]["total"], "success": sweep["trunk_success"], "phases": {phase: sweep["seconds"][phase] for phase in PHASES},
            "generated_tokens": sweep["generated_tokens"] + sum(stage["generated_tokens"] for stage in stages),
            "trained_tokens": sum(stage["trained_tokens"] for stage in stages), "trained": sum(stage["trained"] for stage in stages),
            "learner_tokens": sum(stage["learner_tokens"] for stage in stages), "stages": len(stages),
            "failed": sum(sum(part["failed"].values()) for part in (sweep, *stages))}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sweeps(sys.argv[1], sys.argv[2], sys.argv[3:])
