"""The coordinator: walks turns K-1 down to 0.

    sweep ── tasks ──► trunks: whole episodes, every boundary kept        (object store; references here)
      │
      └─ for each stage of the algorithm (RTPO: turn K-1 .. 0)
           pool ready ─► boundaries ─► siblings ─► groups ─► credit ─► samples        one Ray Data execution, streamed
                                                                  └─ block by block ─► learner ranks
           all blocks in ──► learner gang: update ──► weights to every generator, proved ──► next stage

What unblocks what: the update waits for the stage's last block; the next stage waits until every serving generator proved the
new version. A stage whose turn no trunk reached, or whose groups all have equal returns, changes nothing and pushes nothing; a method
that collects once (GRPO) has one stage, on the trunks themselves, and one that lets generators fall behind pushes at the sweep's end.
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
from pipelines.counts import EpisodeCounts, StageCounts
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
        self._tokens = 0  # generated in training so far
        self._unpublished = False  # whether the learner is ahead of the generators

    def run(self, folder: str) -> Iterator[Event]:
        """Train; events as they happen. Checkpoints and the final model go under `folder`."""
        run = self._config.run
        yield from self.evaluate(0, 0)
        for sweep in range(run.sweeps):
            before = self._tokens
            yield from self._sweep(sweep)
            done, last = sweep + 1, sweep + 1 == run.sweeps or 0 < run.tokens <= self._tokens
            if run.checkpoint_every and done % run.checkpoint_every == 0:
                self._gang.save_checkpoint(f"{folder}/checkpoints/sweep-{done:06d}")
            if last or self._evaluation_due(done, before):
                yield from self.evaluate(done, self._tokens)
            if last:
                break
        self._gang.export(f"{folder}/final")

    def _evaluation_due(self, done: int, tokens_before: int) -> bool:
        run = self._config.run
        if run.eval_every_tokens:
            return tokens_before // run.eval_every_tokens < self._tokens // run.eval_every_tokens
        return bool(run.eval_every) and done % run.eval_every == 0

    def _sweep(self, sweep: int) -> Iterator[Event]:
        """Trunks, then every stage on them."""
        started = time.perf_counter()
        method, max_turns = self._algorithm, self._config.environment.max_turns
        batch = tasks.training_tasks(self._config.run.seed, sweep, self._config.sampling.tasks_per_sweep)
        trunks, counts, busy = self._episodes(batch, "trunks", self._ask("trunks", sweep, count=method.n_trunks, keep_boundaries=method.branching))
        self._tokens += counts.generated_tokens
        spent = [{"generate": busy}]
        for number, stage in enumerate(method.stages(max_turns)):
            if stage.turn is None or counts.boundaries[stage.turn]:
                event = self._stage(sweep, number, stage, trunks, counts)
                self._tokens += event["generated_tokens"]
                spent.append(event["seconds"])
                yield event
        if self._unpublished:
            spent.append({"broadcast": self._push().seconds})
        yield {"kind": "sweep", "sweep": sweep, "tasks": len(batch), "trunk_success": rate(counts.successes, counts.episodes),
               "trunk_turns_mean": rate(counts.turns, counts.episodes), "trunk_ends": dict(counts.ends), "failed": dict(counts.failed),
               "failed_first": counts.failed_first, "generated_tokens": counts.generated_tokens, "weight_version": self._version,
               "retired": self._retired(), "seconds": _phases(spent, time.perf_counter() - started)}

    def _stage(self, sweep: int, number: int, stage: Stage, trunks: ray.data.MaterializedDataset, episodes: EpisodeCounts) -> Event:
        """One stage: collect and credit, update, publish."""
        started = time.perf_counter()
        self._ready()
        seed = self._config.run.seed
        ask = self._ask("siblings", sweep, number if stage.turn is None else stage.turn)
        blocks = stage_samples(trunks, stage, self._config.algorithm, ask, self._collection())
        counts = self._gang.counts([self._gang.feed(block) for block in blocks])
        self._check(counts, f"sweep {sweep}, {stage_name(stage)}", stage, episodes)
        collected = time.perf_counter()
        update = self._gang.update(counts.groups, counts.comparable, derive_seed(seed, sweep, "update", number if stage.turn is None else stage.turn))
        learned = time.perf_counter()
        self._unpublished = self._unpublished or update.optimizer_steps > 0
        published = self._push() if self._unpublished and stage.publish else None
        done = time.perf_counter()
        spent = {"generate": self._busy(), "credit": counts.credit_seconds, "learn": learned - collected, "broadcast": done - learned}
        return stage_event(sweep, stage, counts, update, published) | {"retired": self._retired(), "seconds": _phases([spent], done - started)}

    def _push(self) -> Published:
        published = self._publish(self._version + 1)
        self._unpublished = False
        return published

    def _check(self, counts: StageCounts, where: str, stage: Stage, episodes: EpisodeCounts) -> None:
        """Conservation, and no stale sample."""
        accounted = counts.trained + counts.filtered.total() + counts.failed.total()
        if stage.turn is None:  # what branches grow is known block by block, and checked there
            expected = counts.siblings if self._algorithm.branching else episodes.episodes
            asked = f"{episodes.episodes} episodes"
        else:
            expected = episodes.boundaries[stage.turn] * stage.n_siblings
            asked = f"{episodes.boundaries[stage.turn]} boundaries x {stage.n_siblings} siblings = {expected}"
        if not expected == counts.siblings == accounted:
            raise ConservationError(f"{where}: {asked} were asked for; {counts.siblings} came back, {counts.trained} trained + "
                                    f"{dict(counts.filtered)} filtered + {dict(counts.failed)} failed")
        if not counts.versions <= {self._version}:
            raise WeightSyncError(f"{where}: siblings were sampled by weight versions {sorted(counts.versions)}; expected only {self._version}")


def stage_name(stage: Stage) -> str:
    return "all turns" if stage.turn is None else f"turn {stage.turn}"


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
