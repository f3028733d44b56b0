"""The grader contract: what an answer is worth."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

_LOCK = threading.Lock()  # one for all: graders are copied with the environments that hold them, and a lock cannot be


class Grader(ABC):
    """Judges the last response of an episode. One object may be used by many threads.

    Attributes:
        instant: declare True when it takes well under a millisecond and waits for nothing.
        longest_wait: seconds that a verdict may take by the grader's own deadlines, 0 where it has none.
        fields: of the task's row of data that it reads.
        counts: why responses were worth 0 without having been found wrong, as reason -> how many, since the object was made:
            no_answer (nothing that could be judged), too_long, overrun (could not be evaluated in time).
    """

    instant: bool = False
    longest_wait: float = 0.0
    fields: tuple[str, ...] = ("answer",)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def grade(self, response: str, row: Mapping[str, Any]) -> float:
        """What `response`, the whole text of the answering turn, is worth, in [0, 1]. Raises GraderError when it cannot be told: the rollout
        then counts as failed, never as wrong."""

    def nothing(self, reason: str) -> float:
        """0, counted under `reason`."""
        with _LOCK:
            self.counts[reason] += 1
        return 0.0
