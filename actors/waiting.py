"""Waiting for remote work: every wait has a deadline and says what it waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rtpo_ray.errors import DeadlineExceeded


class Doing:
    """What someone is at, and since when; set by one thread, read by another."""

    def __init__(self, what: str) -> None:
        self.now(what)

    def now(self, what: str) -> None:
        self.what, self._since = what, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since


def here() -> NodeAffinitySchedulingStrategy:
    """On the node of whoever asks, if it has room: what a run cannot do without stays off nodes that come and go."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


def on_node() -> str:
    """ " on ADDRESS" for the name that an actor shows of itself; nothing without Ray."""
    return f" on {ray.util.get_node_ip_address()}" if ray.is_initialized() else ""


def wait_for(refs: Any, seconds: float, what: str) -> Any:
    """`ray.get` of one reference or a list. Raises DeadlineExceeded that names `what`, or what the remote work raised."""
    try:
        return ray.get(refs, timeout=seconds)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"waited {seconds:g} s for {what}") from error


def answered(refs: Sequence[Any], seconds: float) -> list[Any]:
    """What those say who answer in time and without an error, in order: for reports, which nobody's death may stop."""
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds) if refs else ([], [])
    found = []
    for ref in ready:
        try:
            found.append(ray.get(ref, timeout=seconds))
        except RayError:
            continue
    return found


def wait_for_end(names: Sequence[str], seconds: float) -> None:
    """Until no actor has one of these names, or one that begins with it where it ends in "*". Raises DeadlineExceeded.

    Names are free again, and CPUs too, some time after an actor was killed or its owner ended; Ray tells nobody when.
    """
    until = time.monotonic() + seconds
    while left := [name for name in ray.util.list_named_actors() if any(_matches(name, wanted) for wanted in names)]:
        if time.monotonic() > until:
            raise DeadlineExceeded(f"waited {seconds:g} s for the end of {', '.join(left)}")
        time.sleep(0.1)


def _matches(name: str, wanted: str) -> bool:
    return name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted
