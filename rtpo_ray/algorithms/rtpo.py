"""RTPO, reverse-turn policy optimisation (arXiv 2608.18682).

Turns are trained from the last to the first. At turn k every sibling starts from the same boundary S_k and is continued to
the end by the policy that the later stages have already improved, so its return-to-go is an on-policy sample of Q(S_k, l_k).
Siblings are the group and its baseline, V_k = mean_j R_j (self included); the advantage R_j - V_k is not divided by a standard
deviation. Trunks only place the boundaries: they carry no gradient and enter no baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtpo_ray.algorithms.base import ClippedSurrogate, Stage

if TYPE_CHECKING:
    from rtpo_ray.config import AlgorithmConfig


class Rtpo:
    def __init__(self, config: AlgorithmConfig) -> None:
        self.n_trunks = config.n_trunks
        self.n_siblings = config.n_siblings
        self.objective = ClippedSurrogate(
            clip_low=config.clip_low, clip_high=config.clip_high, epochs=config.epochs, minibatches=config.minibatches)

    def stages(self, max_turns: int) -> list[Stage]:
        """K-1 down to 0."""
        return [Stage(turn=turn, n_siblings=self.n_siblings) for turn in reversed(range(max_turns))]

    def credit(self, returns: Sequence[float]) -> list[float]:
        """A_j = R_j - mean(R)."""
        baseline = sum(returns) / len(returns)
        return [value - baseline for value in returns]
