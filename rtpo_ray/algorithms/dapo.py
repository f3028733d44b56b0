"""DAPO's switches on GRPO (arXiv 2503.14476): a higher upper clip, the mean over all tokens of the batch, and groups of equal returns
left out of it. (Its refilling of the batch is left out: the batch is smaller instead.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Algorithm, Credit, Objective
from rtpo_ray.algorithms.credit import per_token, returns, standardised
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class Dapo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=2, why="one rollout is its own baseline")
    clip_high: float = opt(0.28, "ratio is clipped above 1 + clip_high", above=0)

    @property
    def objective(self) -> Objective:
        return replace(super().objective, mean_over="weights")

    def credit(self, group: Group) -> Sequence[Credit]:
        values = returns(group)
        return per_token(group, standardised(values)) if max(values) > min(values) else ()
