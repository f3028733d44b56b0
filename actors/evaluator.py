"""Whole episodes through the generator pool: evaluation on held-out tasks, and what the coordinator builds on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.data

from actors.joining import joining
from actors.publisher import AsLoaded, Published, WeightPublisher
from actors.waiting import Doing, answered, wait_for
from pipelines.collect import Ask, Collection, collect_episodes, count_rollouts
from pipelines.counts import EpisodeCounts
from pipelines.tasks import SeedTasks, TaskSource
from rtpo_ray.config import Config
from rtpo_ray.errors import ConservationError
from rtpo_ray.reports.scores import rate, summarise
from rtpo_ray.timeline import Timeline
from rtpo_ray.types import Task, derive_seed

Event = dict[str, Any]


WATCH = 5.0  # seconds between two looks at who is still there


class Evaluator:
    """Args:
    config: the whole configuration.
    pool: actor handle of the generator pool.
    publisher: brings generators to a weight version.
    tasks: where they come from; by default from seeds.
    """

    def __init__(self, *, config: Config, pool: Any, publisher: WeightPublisher | AsLoaded, tasks: TaskSource | None = None) -> None:
        self._config, self._pool, self._publisher = config, pool, publisher
        self._tasks = tasks or SeedTasks(config.run.seed)
        self._version = 0
        self.doing = Doing("waiting to begin")
        self._timeline = Timeline("rtpo-coordinator")
        self._patience = config.cluster.patience
        self._most = max(config.generators.min, config.generators.max)  # generators
        self._watching = pool and pool.watch.remote(WATCH)  # runs as long as the pool

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config.algorithm.name}, {self._config.run.name})"

    def evaluate(self, done: int, tokens: int) -> Iterator[Event]:
        """Held-out tasks, `run.eval_samples` times sampled and once greedily, by the present weights, after `done` sweeps and `tokens` generated
        tokens."""
        if self._config.run.eval_tasks:
            self.doing.now(f"evaluation after {done} sweeps")
            self._ready(self._evaluated_rollouts)
            with self._joining():
                event = self._judge(done, tokens)
            yield {**event, "retired": self._retired()}

    @property
    def _evaluated_rollouts(self) -> int:
        """Episodes of an evaluation that may be under way at once."""
        return self._config.run.eval_tasks * self._config.run.eval_samples

    def _judge(self, done: int, tokens: int) -> Event:
        """An evaluation by generators that are ready."""
        run, started = self._config.run, time.perf_counter()
        batch = self._tasks.held_out(run.eval_tasks)
        ask = self._ask("evaluation", done, count=run.eval_samples)
        with self._timeline.span("evaluation"):
            _, sampled = self._play(batch, "evaluation", ask)
            greedy = self._play(batch, "evaluation", replace(ask, temperature=0.0, count=1))[1] if run.eval_greedy else EpisodeCounts()
        return {"kind": "eval", "sweep": done, "tokens": tokens, "tasks": len(batch), "weight_version": self._version,
                **summarise(sampled, run.eval_samples), "success_greedy": rate(greedy.successes, greedy.judged), "ends": dict(sampled.ends),
                "failed": dict(sampled.failed + greedy.failed), "failed_first": {**greedy.failed_first, **sampled.failed_first},
                "seconds": time.perf_counter() - started}

    def _play(self, batch: Sequence[Task], name: str, ask: Ask, keep: Path | None = None) -> tuple[ray.data.MaterializedDataset, EpisodeCounts]:
        """Whole episodes of `batch` by generators that are ready: where they lie, and what they amount to. `keep`: a folder in which they are
        kept as well."""
        rollouts = len(batch) * ask.count
        episodes = collect_episodes(batch, name, replace(ask, chunk=0), self._collection(), self._blocks(rollouts))
        counts = count_rollouts(episodes.to_arrow_refs(), self._config.sampling.stage_timeout, keep, self._home())
        self._check_episodes(name, rollouts, counts)
        return episodes, counts

    def _check_episodes(self, name: str, asked: int, counts: EpisodeCounts) -> None:
        if counts.episodes != asked:
            raise ConservationError(f"{name}: {asked} episodes were asked for, {counts.episodes} came back")

    def _blocks(self, rollouts: int) -> int:
        """Of a batch with so many: one that fills a generator each, some for every learner rank, and for every generator as many as for others."""
        blocks = max(self._config.learner.ranks, math.ceil(rollouts / self._config.generators.max_num_seqs))
        return math.ceil(blocks / self._most) * self._most

    def _ready(self, rollouts: int) -> None:
        """As many generators as so many rollouts deserve are there or asked for; whoever does not serve the present version is brought to it."""
        if ray.wait([self._watching], timeout=0)[0]:
            wait_for(self._watching, 1, "the generator pool's watch")  # it never ends well: raises why it ended
        wait_for(self._pool.resize.remote(rollouts, self._config.generators.release), self._patience, "the generator pool to take its new size")
        timeout = self._config.cluster.start_timeout + 60
        if wait_for(self._pool.fill.remote(self._version), timeout, "the generator pool to have its generators ready"):
            self._refit()

    def _refit(self) -> None:
        self._publish(self._version)

    def _joining(self) -> AbstractContextManager[None]:
        """A stage's collection: who comes up in its middle takes part."""
        return joining(self._pool, lambda names: self._publisher.admit(self._version, names), self._patience)

    def _publish(self, version: int) -> Published:
        published = self._publisher.publish(version)
        self._version = version
        return published

    def _ask(self, purpose: str, *where: int, count: int = 1, keep_boundaries: bool = False) -> Ask:
        return Ask(seed=derive_seed(self._config.run.seed, purpose, *where), temperature=self._config.sampling.temperature, count=count,
                   keep_boundaries=keep_boundaries, chunk=self._config.sampling.chunk_groups if self._config.run.overlap else 0)

    def _capped(self, ask: Ask) -> Ask:
        """The same, cut off sampling.stage_cap from now."""
        cap = self._config.sampling.stage_cap
        return replace(ask, cutoff=time.time() + cap) if cap else ask

    def _collection(self) -> Collection:
        sampling = self._config.sampling
        return Collection(pool=self._pool, version=self._version, retries=sampling.retries, deadline=time.time() + sampling.stage_timeout,
                          concurrency=sampling.concurrency or 2 * self._most, home=self._home(), patience=self._patience,
                          in_order=sampling.in_order)

    def _home(self) -> str:
        """The node on which Ray Data stays: nodes of generators come and go."""
        return ray.get_runtime_context().get_node_id() if self._config.generators.resource else ""

    def _busy(self) -> float:
        busy: float = wait_for(self._pool.take_busy_seconds.remote(), self._patience, "the generator pool's clock")
        return busy

    def _occupancy(self) -> dict[str, float | None]:
        """Since the last call, over all generators: the share of their slots that was full while they had work, and of what could be under way."""
        members = wait_for(self._pool.members.remote(), self._patience, "the generator pool's members")
        taken = answered([lease.generator.take_occupancy.remote() for lease in members], self._patience)
        full, could, demanded = (sum(part) for part in zip(*((one["slot_seconds"], one["slots"] * one["open_seconds"], one["demand_seconds"])
                                                             for one in taken), strict=True)) if taken else (0.0, 0.0, 0.0)
        return {"slots": rate(full, could), "demand": rate(full, demanded)}

    def _retired(self) -> dict[str, str]:
        """Generators taken out of service since the last event, with the reason."""
        retired: dict[str, str] = wait_for(self._pool.take_retired.remote(), self._patience, "the generator pool's members")
        return retired
