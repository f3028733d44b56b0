"""The driver's watch over the coordinator and the generator pool: that they answer, and that the run gets on. Generators are in the pool's care,
learner ranks in the gang's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from rtpo_ray.errors import CoordinatorLost

PERIOD = 1.0  # seconds between two looks
TELL = 300.0  # seconds at one and the same thing after which it is said what the run is at, and again after as many

log = logging.getLogger(__name__)


class Pulse:
    """Whether one component answers. `ask` asks it, and returns the reference or, when it is not there, None. `limit`: seconds that it may be
    silent; `start`: as long as it has not answered once."""

    def __init__(self, name: str, ask: Callable[[], Any], limit: float, start: float) -> None:
        self.name, self._ask, self._asked, self._limit, self._start = name, ask, ask(), limit, max(start, limit)
        self.said: Any = None  # its last answer
        self.silent = 0.0  # seconds of looking without an answer; rounds are counted, not time: whoever stood still itself blames nobody

    def look(self, period: float) -> None:
        """Take its answer and ask again, or wait on. Raises what its death raises."""
        if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
            self.said = self.said if self._asked is None else ray.get(self._asked, timeout=30)
            self._asked, self.silent = self._ask(), 0.0
        else:
            self.silent += period

    @property
    def lost(self) -> bool:
        return self.silent >= (self._start if self.said is None else self._limit)


def watched(coordinator: Any, events: Any, lost_after: float, stuck_after: float, start: float = 0.0, period: float = PERIOD,
            tell: float = TELL) -> Iterator[ray.ObjectRef]:
    """The references of `events`, a stream of the coordinator's, as they come.

    Raises CoordinatorLost when it or its pool does not answer for `lost_after` seconds (`start`: at first), or when it is at one and the
    same thing for `stuck_after`; it says at what. Raises RayActorError when one of them dies.
    """
    pulse, pool = Pulse("the coordinator", coordinator.doing.remote, lost_after, start), Pulse("the generator pool", Asking(), lost_after, start)
    what, told = "starting", 0.0
    while True:
        if ray.wait([events], timeout=period, fetch_local=False)[0]:
            try:
                ref = next(events)
            except StopIteration:
                return
            yield ref
            pulse.silent = 0.0  # it spoke
            continue
        for one in (pulse, pool):
            one.look(period)
            if one.lost:
                raise CoordinatorLost(f"{one.name} did not answer for {one.silent:.0f} s; the last that the coordinator said: {what}")
        if pulse.said is not None:
            what, seconds = pulse.said
            told = min(told, seconds)  # another step may have begun
            if seconds > stuck_after:
                raise CoordinatorLost(f"it was stuck for {seconds:.0f} s: {what}")
            if seconds >= told + tell:
                told = seconds
                log.warning("still at work for %.0f s: %s", seconds, what)


class Asking:
    """For a sign of life of the generator pool, once there is one."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self) -> Any:
        if self._pool is None:
            try:
                self._pool = ray.get_actor("rtpo-generator-pool")
            except (ValueError, RayError):  # it is not there yet
                return None
        return self._pool.queue_depth.remote()
