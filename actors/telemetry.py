"""What the cluster's Prometheus endpoint shows of a run: the last event, and who is in the generator pool."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

from ray.util.metrics import Counter, Gauge

Event = dict[str, Any]

# field of an event -> (metric, what it is); every one carries the run's name, those of a stage the turn
NUMBERS = {
    "sweep": ("rtpo_sweep", "sweep under way, 0-based"),
    "weight_version": ("rtpo_weight_version", "weight version that sampled, or after a sweep"),
    "success": ("rtpo_success", "share of siblings, or of held-out tasks, with a positive return"),
    "trunk_success": ("rtpo_trunk_success", "share of trunks with a positive return"),
    "zero_advantage_rate": ("rtpo_zero_advantage_rate", "share of groups whose returns are all equal"),
    "logprob_gap_max": ("rtpo_logprob_gap_max", "largest engine-learner log-probability gap of a token, before the update"),
    "k3": ("rtpo_k3", "estimate of KL between engine and learner, before the update"),
    "grad_norm": ("rtpo_grad_norm", "gradient norm before clipping"),
    "clip_fraction": ("rtpo_clip_fraction", "share of tokens that a clip held"),
}
SECONDS = "rtpo_seconds"
TOKENS = "rtpo_generated_tokens"
LOST = "rtpo_lost_rollouts"
RESUMED = "rtpo_resumed"
GENERATORS, VERSIONS, QUEUE = "rtpo_generators", "rtpo_generator_weight_version", "rtpo_queue_depth"
LAG = "rtpo_loop_lag_seconds"


class RunTelemetry:
    """Args:
    run: name of the run, a tag of every metric.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        tags = ("run", "kind", "turn")
        self._numbers = {field: Gauge(name, doc, tags) for field, (name, doc) in NUMBERS.items()}
        self._seconds = Gauge(SECONDS, "seconds of the last stage or sweep by phase", (*tags, "phase"))
        self._tokens = Counter(TOKENS, "tokens generated in training", ("run",))
        self._lost = Counter(LOST, "rollouts lost to errors", ("run",))
        self._resumed = Counter(RESUMED, "times that the run went on after a loss", ("run",))

    def observe(self, event: Event) -> None:
        """Show one event of the coordinator."""
        run = {"run": self._run}
        tags = {**run, "kind": event["kind"], "turn": "" if event.get("turn") is None else str(event["turn"])}
        for field, gauge in self._numbers.items():
            if event.get(field) is not None:
                gauge.set(float(event[field]), tags)
        if event["kind"] in ("stage", "sweep"):
            for phase, seconds in event["seconds"].items():
                self._seconds.set(seconds, {**tags, "phase": phase})
            self._add(self._tokens, event["generated_tokens"], run)
        self._add(self._lost, sum(event.get("failed", {}).values()), run)
        self._add(self._resumed, event["kind"] == "resume", run)

    def _add(self, counter: Counter, amount: float, tags: dict[str, str]) -> None:
        if amount:
            counter.inc(float(amount), tags)


class PoolTelemetry:
    """The same for the generator pool."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._generators = Gauge(GENERATORS, "generators by state", ("run", "state"))
        self._versions = Gauge(VERSIONS, "weight version by generator, -1 before its first and when it is gone", ("run", "generator"))
        self._queue = Gauge(QUEUE, "blocks that wait for a generator with room", ("run",))
        self._lag = Gauge(LAG, "seconds by which an event loop was late when it was last looked at", ("run", "component"))

    def observe(self, states: list[str], members: dict[str, tuple[str, int]], waiting: int, lags: dict[str, float]) -> None:
        """`states`: all there are; `members`: (state, weight version) by name; `lags`: seconds by component."""
        found = Tally(state for state, _ in members.values())
        for state in states:
            self._generators.set(found[state], {"run": self._run, "state": state})
        for name, (state, version) in members.items():
            self._versions.set(-1 if state == "gone" else version, {"run": self._run, "generator": name})
        self._queue.set(waiting, {"run": self._run})
        for component, seconds in lags.items():
            self._lag.set(seconds, {"run": self._run, "component": component})
