"""One stage, event by event.

Two clocks run: seconds, and work, which passes more slowly when more threads are busy than the machine has cores. Engines and learner take
work; environments and the coordinator take seconds.

    blocks ─► least loaded generator with room ─► waiting ─► slots ─► turn done ─► environment ─► waiting ... ─► group complete ─► learner

An engine's running responses all get one token a step, so a response of T tokens ends T steps after it was admitted: an engine needs one event
for each response that ends, not one a token. With nothing that is random in here, equal inputs give equal results.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rtpo_ray.simulation.model import Episode, Machine

FOREVER = float("inf")


@dataclass(slots=True)
class Job:
    """Rollouts that share a boundary or a task, and what they give the learner."""

    rollouts: list[tuple[Episode, int]]  # (episode, turn that it starts at)
    learner_tokens: float = 0.0  # positions to learn once all are complete
    left: int = 0
    cached: bool = False  # whether its first context lies in the engine's prefix cache
    chunk: int = 0  # that it is handed on with


@dataclass(slots=True)
class _Rollout:
    job: Job
    engine: _Engine
    block: _Block
    episode: Episode
    turn: int
    start: int


@dataclass(slots=True)
class _Block:
    jobs: Sequence[Job]
    size: int
    left: int


@dataclass(slots=True, eq=False)
class _Engine:
    """`work` is the clock's at the last event, `steps` how many steps there were until then."""

    number: int
    waiting: deque[_Rollout] = field(default_factory=deque)
    running: list[tuple[float, int, _Rollout]] = field(default_factory=list)  # heap by the step at which they end
    work: float = 0.0
    steps: float = 0.0
    stall: float = 0.0  # work before the next step: prefill, turns
    leased: int = 0
    busy: bool = False
    stamp: int = 0  # of the event that counts; others were overtaken


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Of sampling and learning one stage, in seconds."""

    generate: float  # until the last rollout was complete
    learn: float  # from then until the learner has taken all samples
    generator_busy: float  # sum over the generators
    learner_busy: float  # of the learner as a whole


class Stage:
    """Args:
    blocks: what is leased to a generator together.
    machine: costs.
    generators, ranks: how many.
    overlap: the learner takes groups as they are complete, in chunks; else once all are.
    """

    def __init__(self, blocks: Sequence[Sequence[Job]], machine: Machine, generators: int, ranks: int, overlap: bool) -> None:
        self._machine, self._overlap, self._ranks = machine, overlap, ranks
        self._engines = [_Engine(number) for number in range(generators)]
        self._blocks: deque[_Block] = deque()  # those that wait for a generator
        self._work_events: list[tuple[float, int, int]] = []  # (work, stamp, engine; -1: the learner)
        self._timed: list[tuple[float, int, _Rollout | _Block]] = []  # (seconds, tie, what comes)
        self._tie = itertools.count()
        self._now = self._work = 0.0
        self._active = 0  # engines with something to do
        self._chunks: list[list[float]] = []  # [jobs that are left, positions] of each, in order
        self._handed = 0  # of them, when they are handed on in order
        self._learning = False
        self._to_learn = 0.0  # positions
        self._sampled = 0.0  # when the last rollout was complete
        self._generator_busy = self._learner_busy = 0.0
        for number, jobs in enumerate(blocks):
            size = sum(len(job.rollouts) for job in jobs)
            for place, job in enumerate(job for job in jobs if job.rollouts):
                if place % machine.chunk == 0:
                    self._chunks.append([0, 0.0])
                job.left, job.chunk = len(job.rollouts), len(self._chunks) - 1
                self._chunks[-1] = [self._chunks[-1][0] + 1, self._chunks[-1][1] + job.learner_tokens]
            if size:
                heapq.heappush(self._timed, (number * machine.block, next(self._tie), _Block(jobs, size, size)))

    def run(self) -> StageTimes:
        """Until everything is sampled and, as far as that is asked for, learned."""
        while True:
            while self._work_events and self._stale(self._work_events[0]):
                heapq.heappop(self._work_events)
            slow = self._machine.slowdown(self._active * self._machine.generator_threads
                                          + self._learning * self._ranks * self._machine.learner_threads)
            by_work = self._now + (self._work_events[0][0] - self._work) * slow if self._work_events else FOREVER
            by_clock = self._timed[0][0] if self._timed else FOREVER
            if (when := min(by_work, by_clock)) == FOREVER:
                break
            self._generator_busy += self._active * (when - self._now)
            self._learner_busy += self._learning * (when - self._now)
            if by_work <= by_clock:
                self._now, self._work = when, self._work_events[0][0]
                _, _, engine = heapq.heappop(self._work_events)
                if engine < 0:
                    self._learning = False
                else:
                    self._finish(self._engines[engine])
            else:
                self._work, self._now = self._work + (when - self._now) / slow, when
                self._arrive(heapq.heappop(self._timed)[2])
            self._learn()
        return StageTimes(self._sampled, max(0.0, self._now - self._sampled), self._generator_busy, self._learner_busy)

    def _stale(self, event: tuple[float, int, int]) -> bool:
        return event[2] >= 0 and event[1] != self._engines[event[2]].stamp

    def _arrive(self, what: _Rollout | _Block) -> None:
        """A block is ready to be leased, or an environment has answered."""
        if isinstance(what, _Block):
            self._blocks.append(what)
            self._lease()
        else:
            self._catch_up(what.engine)
            what.engine.waiting.append(what)
            self._admit(what.engine)

    def _lease(self) -> None:
        """Blocks to the least loaded generators, while there is room: one batch at work, one waiting."""
        while self._blocks:
            block, engine = self._blocks[0], min(self._engines, key=lambda e: (e.leased, e.number))
            if engine.leased and engine.leased + block.size > 2 * self._machine.slots:
                return
            self._blocks.popleft()
            engine.leased += block.size
            self._catch_up(engine)
            for job in block.jobs:
                engine.waiting.extend(_Rollout(job, engine, block, episode, turn, turn) for episode, turn in job.rollouts)
            self._admit(engine)

    def _catch_up(self, engine: _Engine) -> None:
        """The engine's steps until now."""
        passed, engine.work = self._work - engine.work, self._work
        stalled = min(engine.stall, passed)
        engine.stall -= stalled
        if engine.running:
            engine.steps += (passed - stalled) / self._step(engine)

    def _step(self, engine: _Engine) -> float:
        return max(self._machine.step + self._machine.sequence * len(engine.running), 1e-12)

    def _finish(self, engine: _Engine) -> None:
        """Responses that end with this step."""
        self._catch_up(engine)
        engine.steps = ended = engine.running[0][0]  # exactly: what ends together must not be split by rounding
        while engine.running and engine.running[0][0] <= ended:
            rollout = heapq.heappop(engine.running)[2]
            seconds, rollout.turn = rollout.episode[rollout.turn].seconds, rollout.turn + 1
            if rollout.turn == len(rollout.episode):
                self._complete(rollout)
            elif seconds:
                heapq.heappush(self._timed, (self._now + seconds, next(self._tie), rollout))
            else:
                engine.waiting.append(rollout)
        self._admit(engine)

    def _complete(self, rollout: _Rollout) -> None:
        job, block, engine = rollout.job, rollout.block, rollout.engine
        job.left -= 1
        block.left -= 1
        self._sampled = self._now
        if not job.left:
            self._hand_on(job.chunk)
        if not block.left:
            engine.leased -= block.size
            self._lease()

    def _hand_on(self, number: int) -> None:
        """One job more of this chunk is complete: what can go to the learner does."""
        self._chunks[number][0] -= 1
        if not self._machine.ordered:
            self._to_learn += self._chunks[number][1] * (not self._chunks[number][0])
            return
        while self._handed < len(self._chunks) and not self._chunks[self._handed][0]:
            self._to_learn += self._chunks[self._handed][1]
            self._handed += 1

    def _admit(self, engine: _Engine) -> None:
        """Those that wait take free slots at the next step; the engine's next event follows."""
        while engine.waiting and len(engine.running) < self._machine.slots:
            rollout = engine.waiting.popleft()
            engine.stall += self._machine.turn + self._machine.prefill * self._uncached(rollout)
            ends = -(-(engine.steps - 1e-9) // 1) + rollout.episode[rollout.turn].response
            heapq.heappush(engine.running, (ends, next(self._tie), rollout))
        self._active += bool(engine.running) - engine.busy
        engine.busy = bool(engine.running)
        engine.stamp += 1
        if engine.running:
            left = engine.stall + max(0.0, engine.running[0][0] - engine.steps) * self._step(engine)
            heapq.heappush(self._work_events, (self._work + left, engine.stamp, engine.number))

    def _uncached(self, rollout: _Rollout) -> int:
        """Prompt tokens to compute: whole blocks are found again when the rollout itself or another one of its job left them."""
        context = rollout.episode[rollout.turn].context
        if rollout.turn > rollout.start:
            before = rollout.episode[rollout.turn - 1]
            known = before.context + before.response
        else:
            known, rollout.job.cached = context * rollout.job.cached, True
        block = self._machine.cache_block
        return context - min(known, context - 1) // block * block

    def _learn(self) -> None:
        """An idle learner takes what is complete."""
        sampling = self._active or self._blocks or self._timed
        if self._learning or not self._to_learn or (sampling and not self._overlap):
            return
        work = self._to_learn * self._machine.learner_token / self._ranks**self._machine.learner_scaling
        self._learning, self._to_learn = True, 0.0
        heapq.heappush(self._work_events, (self._work + work, 0, -1))
