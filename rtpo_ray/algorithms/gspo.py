"""GSPO: GRPO with one ratio a response, the geometric mean of its tokens' (arXiv 2507.18071). A response is a turn's here.

With one optimizer step a stage every ratio is 1 and the gradient is GRPO's; it differs from the second step on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Objective
from rtpo_ray.algorithms.grpo import Grpo
from rtpo_ray.options import opt


@dataclass(frozen=True, kw_only=True)
class Gspo(Grpo):
    clip_low: float = opt(3e-4, "ratio is clipped below 1 - clip_low", above=0)
    clip_high: float = opt(4e-4, "ratio is clipped above 1 + clip_high", above=0)

    @property
    def objective(self) -> Objective:
        return replace(super().objective, ratio="sequence")
