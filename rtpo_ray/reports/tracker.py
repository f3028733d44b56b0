"""Where the events of a run go: metrics.jsonl, Aim, and one short line each in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtpo_ray.config import Config, to_yaml

Event = dict[str, Any]


class Tracker:
    """Args:
    config: whole configuration; written to `config.yaml`.
    folder: the run's folder; created here. Raises FileExistsError when it holds a run already.
    say: prints a line.
    """

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None] = print) -> None:
        if (folder / "metrics.jsonl").exists():
            raise FileExistsError(f"{folder} holds a run already; choose another run.name or remove the folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
        self._say, self._sweeps, self._budget, self._tokens = say, config.run.sweeps, config.run.tokens, 0
        self._started = time.monotonic()
        self._trained_since: float | None = None  # when the first sweep began
        self._metrics = (folder / "metrics.jsonl").open("a", buffering=1)
        self._aim = _open_aim(config, folder.parent) if config.run.aim else None

    def record(self, event: Event) -> None:
        """Keep one event and show it."""
        event = {**event, "time": time.time()}
        self._metrics.write(json.dumps(event, allow_nan=False) + "\n")
        if self._aim is not None:
            _to_aim(self._aim, event)
        if event["kind"] in ("stage", "sweep"):
            self._tokens += event["generated_tokens"]
        if event["kind"] == "eval" and event["sweep"] == 0:
            self._trained_since = time.monotonic()
        self._say(self._line(event))

    def close(self, status: str) -> None:
        """Flush and end the Aim run; `status` is finished, interrupted or failed."""
        self._metrics.close()
        if self._aim is not None:
            self._aim["status"] = status
            self._aim.close()

    def _line(self, event: Event) -> str:
        return {"stage": _stage_line, "sweep": self._sweep_line, "eval": eval_line}[event["kind"]](event)

    def _sweep_line(self, event: Event) -> str:
        done = event["sweep"] + 1
        spent = time.monotonic() - (self._trained_since or self._started)
        share = max(done / self._sweeps, self._tokens / self._budget if self._budget else 0.0)
        left = spent / share * max(0.0, 1 - share)
        of = "" if self._budget else f"/{self._sweeps}"
        return (f"sweep {done}{of}  trunks {_percent(event['trunk_success'])} in {event['trunk_turns_mean']:.1f} turns  "
                f"weights v{event['weight_version']}  {self._tokens:,} tokens  {event['seconds']['total']:.1f} s  left {left / 60:.1f} min"
                f"{_lost(event)}")


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
            f"{event['tasks']} held-out tasks, {event['tool_calls_mean']:.1f} tool calls, {event['malformed_calls']} malformed{_lost(event)}")


def _lost(event: Event) -> str:
    """Lines about generators taken out of service and rollouts that failed, the first error with what it happened on."""
    lines = [f"\n    RETIRED {name}: {reason}" for name, reason in event["retired"].items()]
    if event["failed"]:
        message = next(iter(event["failed"]))
        lines.append(f"\n    FAILED {sum(event['failed'].values())}, first {event['failed_first'][message]}: {message}")
    return "".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _open_aim(config: Config, root: Path) -> Any:
    """An Aim run. The repository is made once, under a lock: two makers at once leave it broken for good."""
    from aim import Repo, Run
    from filelock import FileLock
    from omegaconf import OmegaConf

    with FileLock(root / ".aim.lock", timeout=60):
        if not Repo.exists(str(root)):
            Repo.from_path(str(root), init=True)
    run = Run(repo=str(root), experiment=config.run.experiment or config.run.name, system_tracking_interval=None, log_system_params=False,
              capture_terminal_logs=False)
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
