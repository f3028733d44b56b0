"""Dr. GRPO: GRPO without the two biases, i.e. no division by the standard deviation and a constant divisor instead of the rollout's
length (arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Credit
from rtpo_ray.algorithms.credit import centred, per_token, returns
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class DrGrpo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=2, why="one rollout is its own baseline")
    divisor: int = opt(64, "tokens by which the sum over a rollout's tokens is divided, whatever its length", least=1)

    def credit(self, group: Group) -> Sequence[Credit]:
        return per_token(group, centred(returns(group)), divisor=self.divisor * len(group.siblings))
