"""A whole sweep of a method on so many generators and learner ranks.

    trunks ─► for each stage: siblings ─► learner ─► push                     (RTPO: K of them; GRPO: one, on the trunks themselves)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Algorithm
from rtpo_ray.algorithms.base import Stage as Plan
from rtpo_ray.errors import ConfigError
from rtpo_ray.simulation.events import Job, Stage, StageTimes
from rtpo_ray.simulation.model import Episode, Machine, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a sweep is made. overlap: the learner takes groups while others are still sampled; of a method without branches, whose trunks are
    its groups, while other trunks are."""

    generators: int
    ranks: int
    overlap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Trunks (turn -1), or one stage (turn None: all turns). Seconds, as a run's metrics have them."""

    turn: int | None
    rollouts: int
    generated_tokens: int
    trained_tokens: float
    learner_tokens: float
    generate: float
    learn: float
    push: float
    other: float
    generator_busy: float  # sum over the generators
    learner_busy: float

    @property
    def total(self) -> float:
        return self.generate + self.learn + self.push + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep takes. `parts`: the trunks, then its stages in order; trunks that are learned while they are sampled are one part with that
    stage."""

    shape: Shape
    parts: tuple[Part, ...]
    outside: float  # seconds of the sweep that are of no part

    def sum(self, what: str) -> float:
        """Of one field of all parts."""
        return float(sum(getattr(part, what) for part in self.parts))

    @property
    def seconds(self) -> float:
        return self.sum("total") + self.outside

    @property
    def siblings(self) -> int:
        """Rollouts that are trained on, or would be if their returns differed: of the stages, or the trunks of a method that has no others."""
        return sum(part.rollouts for part in self.parts[1:]) or self.parts[0].rollouts

    @property
    def generators_busy(self) -> float:
        """Share of the sweep's time in which a generator samples."""
        return self.sum("generator_busy") / (self.shape.generators * self.seconds)

    @property
    def learners_busy(self) -> float:
        """Share of the sweep's time in which the learner computes."""
        return self.sum("learner_busy") / self.seconds


def simulate(method: Algorithm, work: Work, machine: Machine, shape: Shape, seed: int = 0) -> Sweep:
    """One sweep. Raises ConfigError for a method whose stages are not known before its trunks are."""
    return _Simulator(method, work, machine, shape, seed).sweep()


class _Simulator:
    def __init__(self, method: Algorithm, work: Work, machine: Machine, shape: Shape, seed: int) -> None:
        self._method, self._work, self._machine, self._shape = method, work, machine, shape
        self._plans = method.stages(work.turns)
        if method.branching and any(plan.turn is None for plan in self._plans):
            raise ConfigError(f"{type(method).__name__} branches where its trunks decide; expected a method that branches at given turns (such as "
                              "rtpo) or not at all (such as grpo)")
        self._rng = random.Random(seed)
        self._trunks = work.take(work.tasks * method.n_trunks, 0, self._rng)

    def sweep(self) -> Sweep:
        first, plans = self._plans[0], self._plans
        if self._shape.overlap and first.turn is None:
            parts, plans = [self._part(None, self._tasks(), learn=True, publish=first.publish, samples=True)], plans[1:]
        else:
            parts = [self._part(-1, self._tasks(), learn=False, publish=False, samples=True)]
        for plan in plans:
            if plan.turn is None:
                parts.append(self._part(None, self._tasks(), learn=True, publish=plan.publish, samples=False))
            elif any(len(trunk) > plan.turn for trunk in self._trunks):
                parts.append(self._part(plan.turn, self._branches(plan), learn=True, publish=plan.publish, samples=True))
        return Sweep(shape=self._shape, parts=tuple(parts), outside=self._machine.sweep)

    def _tasks(self) -> list[Job]:
        """The trunks of every task, all turns of which would be trained."""
        each = self._method.n_trunks
        return [Job([(trunk, 0) for trunk in self._trunks[first:first + each]]) for first in range(0, len(self._trunks), each)]

    def _branches(self, plan: Plan) -> list[Job]:
        """The siblings of every trunk that has the stage's turn; an empty job where it has not."""
        assert plan.turn is not None
        count = plan.n_siblings - plan.with_trunk
        reached = sum(len(trunk) > plan.turn for trunk in self._trunks)
        taken = iter(self._work.take(reached * count, plan.turn, self._rng))
        return [Job([(next(taken), plan.turn) for _ in range(count)] if len(trunk) > plan.turn else []) for trunk in self._trunks]

    def _part(self, turn: int | None, jobs: list[Job], *, learn: bool, publish: bool, samples: bool) -> Part:
        """`learn`: and push when `publish`; `samples`: the rollouts are sampled here, not before."""
        rollouts = [rollout for job in jobs for rollout in job.rollouts]
        generated = sum(t.response for episode, start in rollouts for t in episode[start:])
        for job in jobs if learn else ():
            job.learner_tokens = self._positions(turn, [episode for episode, _ in job.rollouts])
        to_learn = sum(job.learner_tokens for job in jobs)
        trained = sum(self._trained(turn, [episode for episode, _ in job.rollouts]) for job in jobs) if learn else 0.0
        blocks = _split(jobs, self._block_count())
        if samples:
            times = Stage(blocks, self._machine, self._shape.generators, self._shape.ranks, self._shape.overlap).run()
        else:
            times = self._learn_alone(to_learn)
        update, push = 0.0, 0.0
        if learn:
            machine, ranks, generators = self._machine, self._shape.ranks, self._shape.generators
            update = machine.update * machine.slowdown(ranks * machine.learner_threads)
            push = machine.push_seconds(generators) * machine.slowdown(generators * machine.generator_threads) if publish else 0.0
        other = self._machine.stage + (0.0 if samples else self._machine.rollout * len(rollouts))
        return Part(turn=turn, rollouts=len(rollouts) if samples else 0, generated_tokens=generated if samples else 0, trained_tokens=trained,
                    learner_tokens=to_learn, generate=times.generate, learn=times.learn + update, push=push, other=other,
                    generator_busy=times.generator_busy, learner_busy=times.learner_busy + update)

    def _learn_alone(self, positions: float) -> StageTimes:
        """What was sampled before."""
        machine, ranks = self._machine, self._shape.ranks
        seconds = positions * machine.learner_token / ranks**machine.learner_scaling * machine.slowdown(ranks * machine.learner_threads)
        return StageTimes(0.0, seconds, 0.0, seconds)

    def _block_count(self) -> int:
        """As the coordinator cuts trunks into blocks."""
        rollouts = len(self._trunks) * max(1, *(plan.n_siblings for plan in self._plans))
        return max(self._shape.generators, self._shape.ranks, math.ceil(rollouts / self._machine.slots))

    def _informative(self, turn: int | None, count: int) -> float:
        """Expected share of groups with different returns, which alone are learned."""
        return 1 - self._work.returns[turn or 0].equal(count) if count else 0.0

    def _trained(self, turn: int | None, episodes: Sequence[Episode]) -> float:
        tokens = sum(t.response for episode in episodes for t in (episode if turn is None else episode[turn:turn + 1]))
        return tokens * self._informative(turn, len(episodes))

    def _positions(self, turn: int | None, episodes: Sequence[Episode]) -> float:
        """Expected positions of the learner's passes: turns of a rollout share one sequence."""
        if not episodes:
            return 0.0
        last = [episode[-1] if turn is None else episode[turn] for episode in episodes]
        positions = sum(t.context + t.response for t in last)
        if self._work.shared:
            positions -= (len(episodes) - 1) * min(episode[turn or 0].context for episode in episodes)
        return positions * self._work.padding * self._informative(turn, len(episodes))


def _split(jobs: Sequence[Job], count: int) -> list[Sequence[Job]]:
    """`count` runs of almost equal numbers of jobs."""
    edges = [number * len(jobs) // count for number in range(count + 1)]
    return [jobs[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


def like(method: Algorithm, work: Work, mine: Sweep, other: Sweep, what: str) -> Algorithm:
    """`method`, a sweep of which is `mine`, with the number of trunks a task at which it has as many tokens (`what`: generated or trained) as
    `other`: those generated grow with the trunks, those trained with the share of groups whose returns differ as well."""
    def tokens(trunks: int) -> float:
        return trunks * (1 - work.returns[0].equal(trunks) if what == "trained" else 1.0)

    wanted = tokens(method.n_trunks) * other.sum(f"{what}_tokens") / max(mine.sum(f"{what}_tokens"), 1e-9)
    trunks = 2
    while tokens(trunks + 1) <= wanted:
        trunks += 1
    return replace(method, n_trunks=trunks + (wanted - tokens(trunks) > tokens(trunks + 1) - wanted))
