"""The grader contract: what an answer is worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Grader(ABC):
    """Judges the last response of an episode.

    Attributes:
        instant: declare True when it takes well under a millisecond and waits for nothing.
        fields: of the task's row of data that it reads.
    """

    instant: bool = False
    fields: tuple[str, ...] = ("answer",)

    @abstractmethod
    def grade(self, response: str, row: Mapping[str, Any]) -> float:
        """What `response`, the whole text of the answering turn, is worth, in [0, 1]. Raises GraderError when it cannot be told: the rollout
        then counts as failed, never as wrong."""
