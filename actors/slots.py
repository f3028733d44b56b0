"""Who is let in next where only so many may be inside: the engine's slots, and how full they are kept."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rtpo_ray.engines.base import Sampler
from rtpo_ray.timeline import Timeline
from rtpo_ray.types import Completion, Sampling

Rank = tuple[float, ...]  # the lowest is let in first


class Slots:
    """`size` places on one event loop. A place that is given back goes to the lowest rank after one turn of the loop, so that whoever gave it
    back and comes again at once is ranked with those who wait."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._numbers = itertools.count()  # equal ranks are let in as they came
        self._waiting: list[tuple[Rank, int, asyncio.Future[None]]] = []
        self._due = False

    @asynccontextmanager
    async def held(self, rank: Rank) -> AsyncIterator[None]:
        """A place for as long as the block runs."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (rank, next(self._numbers), turn))
        self._settle_soon(loop)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was let in meanwhile
                self._leave(loop)
            raise
        try:
            yield
        finally:
            self._leave(loop)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        self._free += 1
        self._settle_soon(loop)

    def _settle_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._due:
            self._due = True
            loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._due = False
        while self._free and self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # or it was cancelled
                self._free -= 1
                turn.set_result(None)


class Occupancy:
    """How many sequences an engine of `slots` samples, against how many it could.

    `take` gives integrals since its last call: `slot_seconds` of sequences under way, `open_seconds` in which there was work, and
    `demand_seconds` of min(slots, open rollouts): slot_seconds / (slots * open_seconds) is how full the engine was, slot_seconds /
    demand_seconds how much of what could be under way was.
    """

    def __init__(self, slots: int, timeline: Timeline) -> None:
        self._slots, self._timeline = slots, timeline
        self._open = self._running = 0
        self._since = time.monotonic()
        self._busy_from = 0.0
        self._sums = dict.fromkeys(("slot_seconds", "open_seconds", "demand_seconds"), 0.0)

    def open(self, change: int) -> None:
        """So many more rollouts are to be played, or fewer."""
        self._account()
        self._open += change

    def run(self, change: int) -> None:
        """So many more sequences are under way, or fewer."""
        self._account()
        was, self._running = self._running, self._running + change
        if not was:
            self._busy_from = time.time()
        elif not self._running:
            self._timeline.add("sampling", self._busy_from, time.time(), "engine")

    def take(self) -> dict[str, float]:
        """The integrals, and `slots`."""
        self._account()
        taken, self._sums = self._sums, dict.fromkeys(self._sums, 0.0)
        return {"slots": float(self._slots), **taken}

    def _account(self) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._sums["slot_seconds"] += seconds * self._running
        self._sums["open_seconds"] += seconds * (self._open > 0)
        self._sums["demand_seconds"] += seconds * min(self._slots, self._open)


class Seat:
    """One rollout's way to the engine: every response waits for a slot. A rollout that has begun goes before those that have not; of the
    others the lowest rank is first."""

    def __init__(self, engine: Sampler, slots: Slots, occupancy: Occupancy, rank: Rank) -> None:
        self._engine, self._slots, self._occupancy = engine, slots, occupancy
        self._rank = rank
        self._begun = 0

    async def generate(self, context_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As of the engine."""
        async with self._slots.held((-self._begun, *self._rank)):
            self._begun = 1
            self._occupancy.run(+1)
            try:
                return await self._engine.generate(context_ids, sampling)
            finally:
                self._occupancy.run(-1)
