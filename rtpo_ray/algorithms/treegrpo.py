"""TreeGRPO: chains of a task grow branches at random nodes; a leaf is compared with all leaves of the task and with those of its own
tree (arXiv 2509.21240).

One round: every tree draws `n_branches` of its chain's boundaries, the root included, and plays each to the end. A leaf is trained with
the whole chain from the task to it, so a shared node counts once for every leaf below it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Branch, Credit, Stage
from rtpo_ray.algorithms.credit import leaf_returns, per_trajectory, standardised
from rtpo_ray.options import opt
from rtpo_ray.types import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class TreeGrpo(Algorithm):
    n_trunks: int = opt(4, "trees a task", least=1)
    n_branches: int = opt(3, "branches a tree", least=1)

    branching = True

    def branches(self, stage: Stage, trunks: Sequence[Rollout], rng: random.Random) -> Sequence[Branch]:
        """Drawn with replacement."""
        picks: Counter[tuple[int, int]] = Counter()
        for index, trunk in enumerate(trunks):
            picks.update((index, boundary.turn) for boundary in rng.choices(trunk.boundaries, k=self.n_branches))
        return [Branch(index, turn, count) for (index, turn), count in sorted(picks.items())]

    def credit(self, group: Group) -> Sequence[Credit]:
        """z over the task's leaves + z over the tree's."""
        values = leaf_returns(group)
        whole = standardised(values)
        trees: dict[str, list[int]] = {}
        for index, sibling in enumerate(group.siblings):
            trees.setdefault(sibling.parent or sibling.rollout_id, []).append(index)
        within = [0.0] * len(values)
        for members in trees.values():
            for index, value in zip(members, standardised([values[index] for index in members]), strict=True):
                within[index] = value
        return per_trajectory(group, [a + b for a, b in zip(whole, within, strict=True)])
