"""SeeUPO: one batch of rollouts, updated turn by turn with an advantage that is carried from turn to turn (arXiv 2602.06554).

M_K = A, and for t = K-1 .. 0 the learner maximises min(s_t M, clip(s_t) M) on turn t, s_t the geometric mean of the response's token
ratios, then M_t = [pi_new(l_t) / pi_old(l_t)] M_{t+1}, with pi_old the policy before the whole stage. The released code carries the
geometric mean clipped to [.8, 1.2] and clamps advantages to +/-3: `carry: geometric`, `carry_clip: 0.2`, `advantage_clip: 3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Algorithm, Credit, Objective, TurnOrder
from rtpo_ray.algorithms.credit import centred, per_response, returns, standardised
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class SeeUpo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=2, why="one rollout is its own baseline")
    update_order: str = opt("reverse", "in which turns are updated", choices=("reverse", "natural", "random"))
    normalisation: str = opt("batch", "what R - mean(R of the task) is divided by the standard deviation of", choices=("batch", "group", "none"))
    carry: str = opt("product", "ratio of a response that is carried on: product of its tokens' or geometric mean", choices=("product", "geometric"))
    carry_clip: float = opt(0.0, "the carried ratio is clipped to 1 +/- this; 0: no clip", least=0)
    advantage_clip: float = opt(0.0, "advantages are clamped to +/- this; 0: no clamp", least=0)

    @property
    def objective(self) -> Objective:
        turns = TurnOrder(order=self.update_order, carry=self.carry, carry_clip=self.carry_clip, advantage_clip=self.advantage_clip)
        return replace(super().objective, ratio="sequence", normalise=self.normalisation == "batch", turns=turns)

    def credit(self, group: Group) -> Sequence[Credit]:
        return per_response(group, (standardised if self.normalisation == "group" else centred)(returns(group)))
