"""GiGPO: GRPO's advantage of the episode plus one of the step, among steps that start in the same state (arXiv 2505.10978).

A = A_episode + step_weight * A_step. Steps of a task's rollouts with equal environment state form a group; their discounted returns-to-go
are standardised in it. A step alone in its state gets A_step = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Credit
from rtpo_ray.algorithms.credit import per_trajectory, returns, standardised
from rtpo_ray.options import opt
from rtpo_ray.types import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class GiGpo(Algorithm):
    n_trunks: int = opt(8, "rollouts a task", least=2, why="one rollout is its own baseline")
    step_weight: float = opt(1.0, "weight of the step's advantage", least=0)
    gamma: float = opt(0.95, "discount a turn in the step's return", above=0, most=1)

    def credit(self, group: Group) -> Sequence[Credit]:
        steps = self._step_advantages(group)
        credits = per_trajectory(group, standardised(returns(group)))
        return [Credit(c.sibling, c.record, c.advantage + self.step_weight * steps[c.sibling, c.record.turn], c.weight) for c in credits]

    def _step_advantages(self, group: Group) -> dict[tuple[int, int], float]:
        """By (sibling, turn)."""
        values: dict[tuple[int, int], float] = {}
        same_state: dict[str, list[tuple[int, int]]] = {}
        for index, sibling in enumerate(group.siblings):
            values.update({(index, turn): value for turn, value in _to_go(sibling, self.gamma).items()})
            for record in sibling.turns:
                if record.kind == "action":
                    same_state.setdefault(record.state_hash, []).append((index, record.turn))
        advantages: dict[tuple[int, int], float] = {}
        for members in same_state.values():
            advantages.update(zip(members, standardised([values[member] for member in members]), strict=True))
        return advantages


def _to_go(rollout: Rollout, gamma: float) -> dict[int, float]:
    """Discounted return-to-go by turn."""
    values: dict[int, float] = {}
    value = 0.0
    for record in reversed(rollout.turns):
        if record.kind == "action":
            value = record.reward + gamma * value
            values[record.turn] = value
    return values
