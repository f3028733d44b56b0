"""An algorithm is data about the loop: which stages a sweep has, what credit a response gets, which objective is maximised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """All work of one turn: collect `n_siblings` at every boundary of `turn`, update, publish the new weights."""

    turn: int
    n_siblings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate:
    """min(rho A, clip(rho, 1 - low, 1 + high) A) on every token, over `epochs` passes of `minibatches` steps."""

    clip_low: float
    clip_high: float
    epochs: int
    minibatches: int


class Algorithm(Protocol):
    """What the coordinator and the pipelines ask of a method."""

    n_trunks: int
    objective: ClippedSurrogate

    def stages(self, max_turns: int) -> Sequence[Stage]:
        """The stages of one sweep, in the order in which they run."""
        ...

    def credit(self, returns: Sequence[float]) -> list[float]:
        """Advantages [N] of a group's siblings from their returns-to-go [N]."""
        ...
