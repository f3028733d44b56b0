"""Generators that come up in the middle of a stage are brought to its weights and join it, instead of waiting for the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from actors.waiting import wait_for

POLL = 1.0  # seconds that one question to the pool waits for an answer


@contextmanager
def joining(pool: Any, admit: Callable[[list[str]], None], patience: float = 150.0) -> Iterator[None]:
    """While the block runs, `admit` is called, in a thread of its own, with the names of those who came up. What it raises, the block raises.
    `patience`: seconds for the pool to answer."""
    lock, over, errors = threading.Lock(), threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not over.is_set():
                names = wait_for(pool.joining.remote(POLL), patience, "the generator pool to say who has come up")
                with lock:
                    if names and not over.is_set():
                        admit(names)
        except BaseException as error:  # noqa: BLE001 - raised below, where someone can act on it
            errors.append(error)

    threading.Thread(target=look, name="joining", daemon=True).start()
    try:
        yield
    finally:
        with lock:  # one who is just being brought to the weights is waited for; the question to the pool is not
            over.set()
    if errors:
        raise errors[0]
