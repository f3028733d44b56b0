"""The driver's watch over the coordinator: that it answers, and that it gets on. What it watches over is in the pool's and the gang's care."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import ray

from rtpo_ray.errors import CoordinatorLost

PERIOD = 5.0  # seconds between two looks
TELL = 300.0  # seconds without an event after which it is said what the run is at, and again after as many

log = logging.getLogger(__name__)


def watched(coordinator: Any, events: Any, lost_after: float, stuck_after: float, period: float = PERIOD,
            tell: float = TELL) -> Iterator[ray.ObjectRef]:
    """The references of `events`, a stream of the coordinator's, as they come.

    Raises CoordinatorLost when it does not answer for `lost_after` seconds, or is at one and the same thing for `stuck_after`; it says at what.
    """
    asked, silent, told, what = coordinator.doing.remote(), 0.0, 0.0, "starting"
    while True:
        if ray.wait([events], timeout=period, fetch_local=False)[0]:
            try:
                ref = next(events)
            except StopIteration:
                return
            yield ref
            silent = told = 0.0
        elif ray.wait([asked], timeout=0)[0]:
            what, seconds = ray.get(asked, timeout=period)
            asked, silent = coordinator.doing.remote(), 0.0
            if seconds > stuck_after:
                raise CoordinatorLost(f"it was stuck for {seconds:.0f} s: {what}")
            told = min(told, seconds)  # another step may have begun
            if seconds >= told + tell:
                told = seconds
                log.warning("still at work for %.0f s: %s", seconds, what)
        else:  # rounds are counted, not time: a driver that stood still itself blames nobody
            silent += period
            if silent >= lost_after:
                raise CoordinatorLost(f"it did not answer for {silent:.0f} s; the last that it said: {what}")
