"""The coordinator: walks turns K-1 down to 0.

    sweep ── tasks ──► trunks: whole episodes, every boundary kept        (object store; references here)
      │
      └─ for each stage of the algorithm (RTPO: turn K-1 .. 0)
           pool ready ─► boundaries of the turn ─► siblings ─► credit ─► samples      one Ray Data execution, streamed
                                                                  └─ block by block ─► learner ranks
           all blocks in ──► learner gang: update ──► weights to every generator, proved ──► next stage

What unblocks what: the update waits for the stage's last block; the next stage waits until every serving generator proved the
new version. A stage whose turn no trunk reached, or whose groups all have equal returns, changes nothing and pushes nothing.
The coordinator holds references and counts, never token arrays. `run` yields one event (a dict) a stage, sweep and evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import ray.data

from actors.evaluator import Evaluator, Event, rate
from actors.gang import LearnerGang
from actors.publisher import Published, WeightPublisher
from pipelines import tasks
from pipelines.collect import stage_samples
from pipelines.counts import StageCounts
from rtpo_ray.algorithms.base import Algorithm, Stage
from rtpo_ray.config import Config
from rtpo_ray.errors import ConservationError, WeightSyncError
from rtpo_ray.types import UpdateResult, derive_seed


class Coordinator(Evaluator):
    """Args:
    config: the whole configuration.
    algorithm: stages, credit and objective.
    pool: actor handle of the generator pool.
    gang: the learner ranks.
    publisher: brings generators to the learner's weights.
    """

    def __init__(self, *, config: Config, algorithm: Algorithm, pool: Any, gang: LearnerGang, publisher: WeightPublisher) -> None:
        super().__init__(config=config, pool=pool, publisher=publisher)
        self._algorithm, self._gang = algorithm, gang

    def run(self, folder: str) -> Iterator[Event]:
        """Train; events as they happen. Checkpoints and the final model go under `folder`."""
        run = self._config.run
        yield from self.evaluate(0)
        for sweep in range(run.sweeps):
            yield from self._sweep(sweep)
            done = sweep + 1
            if run.checkpoint_every and done % run.checkpoint_every == 0:
                self._gang.save_checkpoint(f"{folder}/checkpoints/sweep-{done:06d}")
            if done == run.sweeps or (run.eval_every and done % run.eval_every == 0):
                yield from self.evaluate(done)
        self._gang.export(f"{folder}/final")

    def _sweep(self, sweep: int) -> Iterator[Event]:
        """Trunks, then every stage on their boundaries."""
        started = time.perf_counter()
        batch = tasks.training_tasks(self._config.run.seed, sweep, self._config.sampling.tasks_per_sweep)
        trunks, counts, busy = self._episodes(batch, "trunks", self._ask("trunks", sweep, count=self._algorithm.n_trunks, keep_boundaries=True))
        spent = [{"generate": busy}]
        for stage in self._algorithm.stages(self._config.environment.max_turns):
            if counts.boundaries[stage.turn]:
                event = self._stage(sweep, stage, trunks, counts.boundaries[stage.turn])
                spent.append(event["seconds"])
                yield event
        yield {"kind": "sweep", "sweep": sweep, "tasks": len(batch), "trunk_success": rate(counts.successes, counts.episodes),
               "trunk_turns_mean": rate(counts.turns, counts.episodes), "trunk_ends": dict(counts.ends), "failed": dict(counts.failed),
               "failed_first": counts.failed_first, "generated_tokens": counts.generated_tokens, "weight_version": self._version,
               "retired": self._retired(), "seconds": _phases(spent, time.perf_counter() - started)}

    def _stage(self, sweep: int, stage: Stage, trunks: ray.data.MaterializedDataset, boundaries: int) -> Event:
        """All work of one turn: collect and credit, update, publish."""
        started = time.perf_counter()
        self._ready()
        ask = self._ask("siblings", sweep, stage.turn, count=stage.n_siblings)
        blocks = stage_samples(trunks, stage.turn, ask, self._collection(), self._algorithm.credit)
        counts = self._gang.counts([self._gang.feed(block) for block in blocks])
        self._check(counts, sweep, stage, boundaries)
        collected = time.perf_counter()
        update = self._gang.update(counts.groups, derive_seed(self._config.run.seed, sweep, "update", stage.turn))
        learned = time.perf_counter()
        published = self._publish(self._version + 1) if update.optimizer_steps else None
        done = time.perf_counter()
        spent = {"generate": self._busy(), "credit": counts.credit_seconds, "learn": learned - collected, "broadcast": done - learned}
        return stage_event(sweep, stage, counts, update, published) | {"retired": self._retired(), "seconds": _phases([spent], done - started)}

    def _check(self, counts: StageCounts, sweep: int, stage: Stage, boundaries: int) -> None:
        """Conservation, and no stale sample."""
        where, produced = f"sweep {sweep}, turn {stage.turn}", boundaries * stage.n_siblings
        accounted = counts.trained + counts.filtered.total() + counts.failed.total()
        if not produced == counts.siblings == accounted:
            raise ConservationError(f"{where}: {boundaries} boundaries x {stage.n_siblings} siblings = {produced} were asked for; "
                                    f"{counts.siblings} came back, {counts.trained} trained + {dict(counts.filtered)} filtered "
                                    f"+ {dict(counts.failed)} failed")
        if not counts.versions <= {self._version}:
            raise WeightSyncError(f"{where}: siblings were sampled by weight versions {sorted(counts.versions)}; expected only {self._version}")


def stage_event(sweep: int, stage: Stage, counts: StageCounts, update: UpdateResult, published: Published | None) -> Event:
    """The metrics of a stage, without its seconds. Rates are null when there is nothing to take them of."""
    trained = update.tokens > 0
    return {
        "kind": "stage", "sweep": sweep, "turn": stage.turn, "groups": counts.groups, "siblings": counts.siblings,
        "success": rate(counts.successes, counts.siblings), "zero_advantage_rate": rate(counts.groups - counts.informative_groups, counts.groups),
        "weight_version": max(counts.versions, default=None), "generated_tokens": counts.generated_tokens, "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_prompt_tokens, "trained": counts.trained,
        "filtered": dict(counts.filtered), "failed": dict(counts.failed), "failed_first": counts.failed_first,
        "logprob_gap_mean": _finite(update.logprob_gap_mean) if trained else None,
        "logprob_gap_max": _finite(update.logprob_gap_max) if trained else None,
        "ratio_geomean": _finite(update.ratio_geomean) if trained else None, "k3": _finite(update.k3) if trained else None,
        "clip_fraction": update.clip_fraction,
        "loss": _finite(update.loss), "grad_norm": _finite(update.grad_norm), "optimizer_steps": update.optimizer_steps, "refused": update.refused,
        "trained_tokens": update.tokens, "learner_tokens": update.learner_tokens,
        "weights_hash": published.hash if published else None, "probe_gap": published.probe_gap if published else None}


def _finite(value: float) -> float | None:
    """JSON has no NaN; a refused update says in words what was wrong."""
    return value if math.isfinite(value) else None


def _phases(spent: list[dict[str, float]], total: float) -> dict[str, float]:
    """Seconds by phase, the total and `other`: what is none of generating, learning or broadcasting."""
    named = {phase: sum(part.get(phase, 0.0) for part in spent) for phase in ("generate", "credit", "learn", "broadcast")}
    return {**named, "other": total - named["generate"] - named["learn"] - named["broadcast"], "total": total}
