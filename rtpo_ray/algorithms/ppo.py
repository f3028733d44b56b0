"""PPO (arXiv 1707.06347) with generalised advantage estimation (arXiv 1506.02438) over tokens or over turns.

The value head sits on the learner's policy; feedback tokens are no steps of the episode. The learner turns rewards into advantages,
since only it knows the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Algorithm, Credit, Critic, Objective
from rtpo_ray.algorithms.credit import per_token
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class Ppo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=1)
    level: str = opt("token", "what a step of the episode is", choices=("token", "turn"))
    gamma: float = opt(1.0, "discount a step", above=0, most=1)
    lam: float = opt(0.95, "GAE's lambda", least=0, most=1)
    value_coef: float = opt(0.5, "weight of the value loss", above=0)
    value_clip: float = opt(0.2, "a value may move this far from the old one before its loss is clipped; 0: no clip", least=0)
    whiten: bool = opt(True, "advantages get mean 0 and standard deviation 1 over the batch's tokens")

    @property
    def objective(self) -> Objective:
        critic = Critic(level=self.level, gamma=self.gamma, lam=self.lam, coef=self.value_coef, clip=self.value_clip, whiten=self.whiten)
        return replace(super().objective, mean_over="weights", critic=critic)

    def credit(self, group: Group) -> Sequence[Credit]:
        return per_token(group, [0.0] * len(group.siblings))
