"""REFUEL: regressing the relative future (arXiv 2410.04612).

A trunk and one sibling share the prefix up to a random turn k. On turn k's tokens the learner minimises
((1 / eta) [log ratio(l_k) - log ratio(l_k')] - (R - R'))^2, the ratios against the policy that sampled both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Algorithm, Branch, Credit, Objective, Stage
from rtpo_ray.algorithms.credit import centred, own_turn, returns
from rtpo_ray.options import opt
from rtpo_ray.types import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class Refuel(Algorithm):
    n_trunks: int = opt(4, "pairs a task", least=1)
    eta: float = opt(1.0, "scale of the log-ratio difference", above=0)

    branching = True

    def check(self, max_turns: int) -> None:
        super().check(max_turns)
        self.refuse("REFUEL's squared error has no ratio to clip or to weigh", "clip_low", "clip_high", "dual_clip", "tis_cap")

    @property
    def objective(self) -> Objective:
        return replace(super().objective, loss="regression", eta=self.eta)

    def stages(self, max_turns: int) -> Sequence[Stage]:
        return (Stage(baseline="boundary"),)

    def branches(self, stage: Stage, trunks: Sequence[Rollout], rng: random.Random) -> Sequence[Branch]:
        """One sibling a trunk, from a boundary drawn evenly."""
        return [Branch(index, rng.choice(trunk.boundaries).turn, 1) for index, trunk in enumerate(trunks)]

    def credit(self, group: Group) -> Sequence[Credit]:
        """Half the difference of the two returns, with its sign: the learner takes the difference again."""
        return own_turn(group, centred(returns(group)))
