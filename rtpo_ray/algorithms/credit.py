"""Pieces of credit that methods share: baselines over returns [N], and how an advantage is spread over a rollout's responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rtpo_ray.algorithms.base import Credit
from rtpo_ray.types import Group, Rollout, TurnRecord


def returns(group: Group) -> list[float]:
    """Return-to-go [N] of every sibling from its first recorded turn on (gamma = 1)."""
    return [sibling.returns_to_go for sibling in group.siblings]


def centred(values: Sequence[float]) -> list[float]:
    """R - mean(R), [N] -> [N]."""
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def standardised(values: Sequence[float]) -> list[float]:
    """(R - mean(R)) / (std(R) + 1e-6) with ddof 1 as in GRPO, [N] -> [N]. One value alone gets 0."""
    if len(values) < 2:
        return [0.0] * len(values)
    deviations = centred(values)
    std = math.sqrt(sum(deviation**2 for deviation in deviations) / (len(values) - 1))
    return [deviation / (std + 1e-6) for deviation in deviations]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """R - mean of the others = N / (N - 1) (R - mean(R)), as in RLOO, [N] -> [N]. One value alone gets 0."""
    scale = len(values) / max(1, len(values) - 1)
    return [deviation * scale for deviation in centred(values)]


def leaf_returns(group: Group) -> list[float]:
    """Return [N] of every sibling from the task's start, its trunk's prefix included."""
    return [float(sum(record.reward for record in chain)) for chain in chains(group)]


def chains(group: Group) -> list[tuple[TurnRecord, ...]]:
    """Every sibling's records from the task's start: the trunk's up to the boundary, then its own."""
    trunks = {sibling.rollout_id: sibling for sibling in group.siblings if not sibling.parent}
    return [_prefix(trunks, sibling) + sibling.turns for sibling in group.siblings]


def _prefix(trunks: dict[str, Rollout], sibling: Rollout) -> tuple[TurnRecord, ...]:
    if not sibling.parent or not sibling.turns:
        return ()
    return tuple(record for record in trunks[sibling.parent].turns if record.turn < sibling.turns[0].turn)


def own_turn(group: Group, advantages: Sequence[float], share: float = 1.0) -> list[Credit]:
    """The sibling's advantage on the group's turn alone: weight `share` / N a sibling, spread over that turn's tokens."""
    credits = []
    for index, (sibling, advantage) in enumerate(zip(group.siblings, advantages, strict=True)):
        records = [record for record in sibling.turns if record.turn == group.turn]
        tokens = sum(len(record.response_ids) for record in records)
        credits += [Credit(index, record, advantage, share * len(record.response_ids) / (tokens * len(group.siblings))) for record in records]
    return credits


def per_trajectory(group: Group, advantages: Sequence[float]) -> list[Credit]:
    """The rollout's advantage on all its turns: weight 1/N a rollout, spread over all its tokens (GRPO's 1/|o|)."""
    credits = []
    for index, (records, advantage) in enumerate(zip(chains(group), advantages, strict=True)):
        tokens = sum(len(record.response_ids) for record in records)
        credits += [Credit(index, record, advantage, len(record.response_ids) / (tokens * len(group.siblings))) for record in records]
    return credits


def per_response(group: Group, advantages: Sequence[float]) -> list[Credit]:
    """The rollout's advantage on all its turns, every response with the weight 1/N, spread over its tokens."""
    return [Credit(index, record, advantage, 1 / len(group.siblings))
            for index, (records, advantage) in enumerate(zip(chains(group), advantages, strict=True)) for record in records]


def per_token(group: Group, advantages: Sequence[float], divisor: float = 1.0) -> list[Credit]:
    """The rollout's advantage on all its turns, every token with the weight 1 / divisor whatever the length of its rollout."""
    return [Credit(index, record, advantage, len(record.response_ids) / divisor)
            for index, (records, advantage) in enumerate(zip(chains(group), advantages, strict=True)) for record in records]
