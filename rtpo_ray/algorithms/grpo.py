"""GRPO: the return of a whole rollout, standardised over the task's rollouts, on every response token (arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Credit
from rtpo_ray.algorithms.credit import per_trajectory, returns, standardised
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class Grpo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=2, why="one rollout is its own baseline")

    def credit(self, group: Group) -> Sequence[Credit]:
        return per_trajectory(group, standardised(returns(group)))
