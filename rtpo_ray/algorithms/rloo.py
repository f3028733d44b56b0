"""RLOO: the baseline of a rollout is the mean of the task's other rollouts (arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Credit
from rtpo_ray.algorithms.credit import leave_one_out, per_trajectory, returns
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class Rloo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=2, why="one rollout has no others to compare it with")

    def credit(self, group: Group) -> Sequence[Credit]:
        return per_trajectory(group, leave_one_out(returns(group)))
