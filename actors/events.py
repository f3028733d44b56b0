"""What the events of a run say: one dict a step, JSON-like."""

from __future__ import annotations

import math
from typing import Any

from actors.publisher import Published
from pipelines.counts import StageCounts
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.reports.scores import rate
from rtpo_ray.types import UpdateResult

Event = dict[str, Any]


def stage_name(stage: Stage) -> str:
    return "all turns" if stage.turn is None else f"turn {stage.turn}"


def stage_event(sweep: int, stage: Stage, counts: StageCounts, update: UpdateResult, published: Published | None) -> Event:
    """The metrics of a stage, without its seconds. Rates are null when there is nothing to take them of."""
    trained = update.tokens > 0
    return {
        "kind": "stage", "sweep": sweep, "turn": stage.turn, "groups": counts.groups, "siblings": counts.siblings,
        "success": rate(counts.successes, counts.siblings), "zero_advantage_rate": rate(counts.groups - counts.informative_groups, counts.groups),
        "weight_version": max(counts.versions, default=None), "generated_tokens": counts.generated_tokens, "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_prompt_tokens, "shareable_prompt_tokens": counts.shareable_prompt_tokens, "trained": counts.trained,
        "filtered": dict(counts.filtered), "failed": dict(counts.failed), "failed_first": counts.failed_first,
        "logprob_gap_mean": finite(update.logprob_gap_mean) if trained else None,
        "logprob_gap_max": finite(update.logprob_gap_max) if trained else None,
        "ratio_geomean": finite(update.ratio_geomean) if trained else None, "k3": finite(update.k3) if trained else None,
        "clip_fraction": update.clip_fraction,
        "loss": finite(update.loss), "grad_norm": finite(update.grad_norm), "optimizer_steps": update.optimizer_steps, "refused": update.refused,
        "trained_tokens": update.tokens, "learner_tokens": update.learner_tokens, "unique_tokens": update.unique_tokens,
        "weights_hash": published.hash if published else None, "probe_gap": published.probe_gap if published else None,
        "push": {"bytes": published.bytes, **published.phases} if published else None}


def finite(value: float) -> float | None:
    """JSON has no NaN; a refused update says in words what was wrong."""
    return value if math.isfinite(value) else None


def phases(spent: list[dict[str, float]], total: float) -> dict[str, float]:
    """Seconds by phase, the total and `other`: what is none of generating, learning or broadcasting. `overlapped`: learning meanwhile."""
    named = {phase: sum(part.get(phase, 0.0) for part in spent) for phase in ("generate", "credit", "overlapped", "learn", "broadcast")}
    return {**named, "other": max(0.0, total - named["generate"] - named["learn"] - named["broadcast"]), "total": total}
