"""Waiting for remote work: every wait has a deadline and says what it waited for."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from rtpo_ray.errors import DeadlineExceeded


def wait_for(refs: Any, seconds: float, what: str) -> Any:
    """`ray.get` of one reference or a list. Raises DeadlineExceeded that names `what`, or what the remote work raised."""
    try:
        return ray.get(refs, timeout=seconds)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"waited {seconds:g} s for {what}") from error
