"""The driver's watch over the coordinator and the generator pool: that they answer, and that the run gets on. Generators are in the pool's care,
learner ranks in the gang's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from rtpo_ray.errors import CoordinatorLost

PERIOD = 1.0  # seconds between two looks
TELL = 300.0  # seconds at one and the same thing after which it is said what the run is at, and again after as many

log = logging.getLogger(__name__)


class Pulse:
    """Whether one component answers. `ask` asks it, and returns the reference or, when it is not there, None."""

    def __init__(self, name: str, ask: Callable[[], Any]) -> None:
        self.name, self._ask, self._asked = name, ask, ask()
        self.said: Any = None  # its last answer
        self.silent = 0.0  # seconds of looking without an answer; rounds are counted, not time: whoever stood still itself blames nobody

    def look(self, period: float) -> None:
        """Take its answer and ask again, or wait on. Raises what its death raises."""
        if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
            self.said = None if self._asked is None else ray.get(self._asked, timeout=30)
            self._asked, self.silent = self._ask(), 0.0
        else:
            self.silent += period


def watched(coordinator: Any, events: Any, lost_after: float, stuck_after: float, period: float = PERIOD,
            tell: float = TELL) -> Iterator[ray.ObjectRef]:
    """The references of `events`, a stream of the coordinator's, as they come.

    Raises CoordinatorLost when it or its pool does not answer for `lost_after` seconds, or when it is at one and the same thing for
    `stuck_after`; it says at what. Raises RayActorError when one of them dies.
    """
    pulse, pool = Pulse("the coordinator", coordinator.doing.remote), Pulse("the generator pool", ask_pool)
    what, told = "starting", 0.0
    while True:
        there = ray.wait([events], timeout=period, fetch_local=False)[0]
        for one in (pulse, pool):
            one.look(0.0 if there else period)
            if one.silent >= lost_after:
                raise CoordinatorLost(f"{one.name} did not answer for {one.silent:.0f} s; the last that the coordinator said: {what}")
        if pulse.said is not None:
            what, seconds = pulse.said
            told = min(told, seconds)  # another step may have begun
            if seconds > stuck_after:
                raise CoordinatorLost(f"it was stuck for {seconds:.0f} s: {what}")
            if seconds >= told + tell:
                told = seconds
                log.warning("still at work for %.0f s: %s", seconds, what)
        if there:
            pulse.silent = 0.0  # it speaks
            try:
                ref = next(events)
            except StopIteration:
                return
            yield ref


def ask_pool() -> Any:
    """A sign of life of the generator pool, once there is one."""
    try:
        return ray.get_actor("rtpo-generator-pool").queue_depth.remote()
    except (ValueError, RayActorError):
        return None
