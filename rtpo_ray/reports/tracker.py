"""Where the events of a run go: metrics.jsonl, Aim, and one short line each in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtpo_ray.config import Config, to_yaml
from rtpo_ray.folders import write_whole
from rtpo_ray.ledger import Ledger

Event = dict[str, Any]

METRICS = "metrics.jsonl"


class Tracker:
    """Args:
    config: whole configuration; written to `config.yaml`.
    folder: the run's folder; created here. Raises FileExistsError when it holds a run already.
    say: prints a line.
    resume: go on with the run in `folder`, whose ledger says what is done.
    """

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None] = print, resume: bool = False) -> None:
        if (folder / METRICS).exists() and not resume:
            raise FileExistsError(f"{folder} holds a run already; choose another run.name or remove the folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", to_yaml(config))
        self._folder, self._say, self._sweeps, self._budget, self._tokens = folder, say, config.run.sweeps, config.run.tokens, 0
        self._began = 0.0  # share of the training that was done when this process began with it
        self._since = time.monotonic()
        self._metrics = (folder / METRICS).open("a", buffering=1)
        self._aim = _open_aim(config, folder) if config.run.aim else None

    def record(self, event: Event) -> None:
        """Keep one event and show it. An event of a resumed run takes back those after the point where it goes on."""
        event = {"time": time.time(), **event}  # the coordinator's have it
        new = [event]
        if event["kind"] == "resume":
            new = self._rebuild(event)
        else:
            self._metrics.write(json.dumps(event, allow_nan=False) + "\n")
        if self._aim is not None:
            for one in new:
                _to_aim(self._aim, one)
        self._tokens += _trained_on(event)
        if event["kind"] == "resume" or (event["kind"] == "eval" and event["sweep"] == 0):
            self._began, self._since = self._share(event["sweep"]), time.monotonic()
        self._say(self._line(event))

    def _rebuild(self, resume: Event) -> list[Event]:
        """metrics.jsonl anew from the ledger, up to `resume`; what comes after it is still to be recorded. Returns those that were not there."""
        with Ledger(self._folder, read_only=True) as ledger:
            events = [event for event in ledger.events() if event["time"] <= resume["time"]]
        self._metrics.close()
        known = {json.loads(line)["time"] for line in (self._folder / METRICS).read_text().splitlines() if line.endswith("}")}
        write_whole(self._folder / METRICS, "".join(json.dumps(event, allow_nan=False) + "\n" for event in events))
        self._metrics = (self._folder / METRICS).open("a", buffering=1)
        self._tokens = sum(_trained_on(event) for event in events)
        return [event for event in events if event["time"] not in known]

    def close(self, status: str) -> None:
        """Flush and end the Aim run; `status` is finished, interrupted or failed."""
        self._metrics.close()
        if self._aim is not None:
            self._aim["status"] = status
            self._aim.close()

    def _line(self, event: Event) -> str:
        return {"stage": _stage_line, "sweep": self._sweep_line, "eval": eval_line, "resume": _resume_line}[event["kind"]](event)

    def _sweep_line(self, event: Event) -> str:
        done = event["sweep"] + 1
        share = self._share(done)
        left = (time.monotonic() - self._since) / max(share - self._began, 1e-9) * max(0.0, 1 - share)
        of = "" if self._budget else f"/{self._sweeps}"
        return (f"sweep {done}{of}  trunks {_percent(event['trunk_success'])} in {_number(event['trunk_turns_mean'])} turns  "
                f"weights v{event['weight_version']}  {self._tokens:,} tokens  {event['seconds']['total']:.1f} s  left {left / 60:.1f} min"
                f"{_cut_off(event['trunk_ends'])}{_lost(event)}")

    def _share(self, sweeps: int) -> float:
        """Of the training, after so many sweeps and the tokens so far."""
        return max(sweeps / max(self._sweeps, 1), self._tokens / self._budget if self._budget else 0.0)


def _trained_on(event: Event) -> int:
    """Tokens generated in training."""
    return event["generated_tokens"] if event["kind"] in ("stage", "sweep") else 0


def _resume_line(event: Event) -> str:
    where = f"sweep {event['sweep'] + 1}" + (f", after {event['stage']} of its stages" if event["stage"] >= 0 else "")
    return f"RESUMED at {where}, weights v{event['weight_version']}, {event['undone']} steps are done again: {event['reason']}"


def _stage_line(event: Event) -> str:
    gap = "-" if event["logprob_gap_max"] is None else f"{event['logprob_gap_max']:.0e}"
    norm = "-" if event["grad_norm"] is None else f"{event['grad_norm']:.2f}"
    turn = "all turns" if event["turn"] is None else f"turn {event['turn']}"
    refused = f"  REFUSED: {event['refused']}" if event["refused"] else ""
    return (f"  {turn}  {event['groups']} groups  {event['siblings']} siblings  success {_percent(event['success'])}  "
            f"equal {_percent(event['zero_advantage_rate'])}  gap {gap}  "
            f"grad {norm}  {event['seconds']['total']:.1f} s{_lost(event)}{refused}")


def eval_line(event: Event) -> str:
    return (f"eval after {event['sweep']} sweeps: success {_percent(event['success'])} sampled, {_percent(event['success_greedy'])} greedy on "
            f"{event['tasks']} held-out tasks, {_number(event['tool_calls_mean'])} tool calls, {event['malformed_calls']} malformed"
            f"{_cut_off(event['ends'])}{_lost(event)}")


def _cut_off(ends: dict[str, int]) -> str:
    """Episodes that generators.max_model_len ended; silence would hide that they could not succeed."""
    return f"  {_percent(ends['overlong'] / sum(ends.values()))} OVERLONG (generators.max_model_len)" if ends.get("overlong") else ""


def _lost(event: Event) -> str:
    """Lines about generators taken out of service and rollouts that failed, the first error with what it happened on."""
    lines = [f"\n    RETIRED {name}: {reason}" for name, reason in event["retired"].items()]
    if event.get("unsaved"):
        lines.append(f"\n    UNSAVED {event['unsaved']}")
    if event["failed"]:
        message = next(iter(event["failed"]))
        lines.append(f"\n    FAILED {sum(event['failed'].values())}, first {event['failed_first'][message]}: {message}")
    return "".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _open_aim(config: Config, folder: Path) -> Any:
    """An Aim run, or the one that `folder` remembers. The repository is made once, under a lock: two makers at once leave it broken for good."""
    from aim import Repo, Run
    from filelock import FileLock
    from omegaconf import OmegaConf

    root, memory = folder.parent, folder / "aim-run"
    with FileLock(root / ".aim.lock", timeout=60):
        if not Repo.exists(str(root)):
            Repo.from_path(str(root), init=True)
    known = memory.read_text() if memory.exists() else None
    run = Run(known, repo=str(root), experiment=config.run.experiment or config.run.name, system_tracking_interval=None, log_system_params=False,
              capture_terminal_logs=False, force_resume=known is not None)
    memory.write_text(run.hash)
    run.name = config.run.name
    run["config"] = OmegaConf.to_container(OmegaConf.structured(config))
    return run


def _to_aim(run: Any, event: Event) -> None:
    """Every number of an event; the turn is the context, so Aim can group and compare by it."""
    context = {"kind": event["kind"]} | ({"turn": event["turn"]} if event.get("turn") is not None else {})
    for name, value in _numbers(event):
        if name not in ("sweep", "turn", "time"):
            run.track(value, name=name, step=event["sweep"], context=context)


def _numbers(event: Event, prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in event.items():
        if isinstance(value, dict) and key not in ("failed_first", "retired"):
            nested = _numbers(value, f"{prefix}{key}.")
            found += nested if key == "seconds" else [(prefix + key, sum(count for _, count in nested))]
        elif isinstance(value, (int, float)):
            found.append((prefix + key, value))
    return found
