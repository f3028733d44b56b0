"""ARPO: extra branches where the model became unsure after a tool's result (arXiv 2507.19849).

`n_trunks` chains first. At a boundary after a tool result a branch grows when alpha + beta (H_k - H_0) > threshold, H the entropy of the
response's first tokens; what is left of `budget` becomes fresh chains. Leaves are credited as in GRPO over the task.

H is estimated by the mean of -log p of the first `entropy_tokens` sampled tokens, divided by `max_entropy`: the engine reports the
log-probability of what it sampled, and its expectation is the entropy. Branches do not branch again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Branch, Credit, Stage
from rtpo_ray.algorithms.credit import leaf_returns, per_trajectory, standardised
from rtpo_ray.options import opt
from rtpo_ray.types import Group, Rollout, TurnRecord


@dataclass(frozen=True, kw_only=True)
class Arpo(Algorithm):
    n_trunks: int = opt(8, "initial chains a task", least=1)
    budget: int = opt(16, "chains and branches a task", least=2)
    alpha: float = opt(0.5, "base of the branching score")
    beta: float = opt(0.2, "weight of the entropy's rise in the branching score")
    threshold: float = opt(0.5, "a boundary with a score above this grows a branch")
    entropy_tokens: int = opt(20, "first tokens of a response over which its entropy is taken", least=1)
    max_entropy: float = opt(math.log(20), "nats that count as an entropy of 1", above=0)

    branching = True

    def check(self, max_turns: int) -> None:
        super().check(max_turns)
        if self.budget < self.n_trunks:
            raise ValueError(f"budget is {self.budget}; expected at least n_trunks ({self.n_trunks}), since the initial chains count")

    def branches(self, stage: Stage, trunks: Sequence[Rollout], rng: random.Random) -> Sequence[Branch]:
        """Boundaries in the order of their turns until the budget is spent, the rest from the task's start."""
        left = self.budget - self.n_trunks
        picks: Counter[tuple[int, int]] = Counter()
        unsure = [(record.turn, index) for index, trunk in enumerate(trunks) for record in trunk.turns
                  if record.kind == "action" and record.turn and self._score(record, trunk.turns[0]) > self.threshold]
        for turn, index in sorted(unsure)[:left]:
            picks[index, turn] += 1
        fresh = left - picks.total()
        for number in range(fresh if trunks else 0):
            picks[number % len(trunks), 0] += 1
        return [Branch(index, turn, count) for (index, turn), count in sorted(picks.items())]

    def _score(self, record: TurnRecord, first: TurnRecord) -> float:
        return self.alpha + self.beta * (self._entropy(record) - self._entropy(first))

    def _entropy(self, record: TurnRecord) -> float:
        head = record.engine_logprobs[: self.entropy_tokens]
        return -sum(head) / len(head) / self.max_entropy

    def credit(self, group: Group) -> Sequence[Credit]:
        return per_trajectory(group, standardised(leaf_returns(group)))
