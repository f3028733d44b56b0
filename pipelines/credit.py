"""Groups to credited samples: plain functions from table to table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.rows import SAMPLES, table_to_groups
from rtpo_ray.types import Group, Rollout, Sample

Credit = Callable[[Sequence[float]], list[float]]


def credit_groups(groups: pa.Table, *, credit: Credit) -> pa.Table:
    """GROUPS rows to SAMPLES rows, one a sibling; every sibling comes out, with its outcome.

    A group with a failed sibling fails whole: its baseline would be biased by whatever made that one fail. A group without
    any spread of advantage is filtered: its gradient is exactly 0.
    """
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for group in table_to_groups(groups):
        rows += _credit_one(group, credit)
    share = (time.perf_counter() - started) / max(1, len(rows))
    for row in rows:
        row["credit_seconds"] = share
    return pa.Table.from_pylist(rows, schema=SAMPLES)


def _credit_one(group: Group, credit: Credit) -> list[dict[str, Any]]:
    failure = next((sibling.failure or "failed without a message" for sibling in group.siblings if sibling.end == "failed"), "")
    overlong = any(sibling.end == "overlong" and not sibling.turns for sibling in group.siblings)
    if failure or overlong:
        outcome, reason = ("failed", failure) if failure else ("filtered", "overlong")
        return [_sample(group, sibling, outcome, reason, 0.0) for sibling in group.siblings]
    advantages = credit([sibling.returns_to_go for sibling in group.siblings])
    if len(advantages) != len(group.siblings):
        raise ValueError(f"group {group.group_id}: credit gave {len(advantages)} advantages for {len(group.siblings)} siblings")
    rounding = 1e-12 * max(1.0, *(abs(sibling.returns_to_go) for sibling in group.siblings))
    informative = any(abs(advantage) > rounding for advantage in advantages)
    outcome, reason = ("trained", "") if informative else ("filtered", "zero_advantage")
    return [_sample(group, sibling, outcome, reason, advantage) for sibling, advantage in zip(group.siblings, advantages, strict=True)]


def _sample(group: Group, sibling: Rollout, outcome: str, reason: str, advantage: float) -> dict[str, Any]:
    trained = outcome == "trained"
    first = sibling.turns[0] if sibling.turns else None
    return {
        "sample_id": sibling.rollout_id, "group_id": group.group_id, "outcome": outcome, "reason": reason, "advantage": advantage,
        "weight": 1.0 / len(group.siblings), "return": sibling.returns_to_go, "turns": len(sibling.turns),
        "weight_version": first.weight_version if first else None,
        "context_ids": first.context_ids if first and trained else (), "context_hash": first.context_hash if first and trained else "",
        "response_ids": first.response_ids if first and trained else (), "engine_logprobs": first.engine_logprobs if first and trained else (),
        "generated_tokens": sum(len(turn.response_ids) for turn in sibling.turns),
        "prompt_tokens": sum(len(turn.context_ids) for turn in sibling.turns),
        "cached_prompt_tokens": sum(turn.cached_prompt_tokens for turn in sibling.turns)}


def samples_to_train(table: pa.Table) -> list[Sample]:
    """The rows that carry a gradient, as the learner takes them. Token arrays stay numpy views of the Arrow buffers."""
    if not len(table):  # an empty block has lost its columns on its way through Ray Data
        return []
    table = table.filter(pc.equal(table["outcome"], "trained"))
    arrays = {name: table[name].combine_chunks() for name in ("context_ids", "response_ids", "engine_logprobs")}
    columns = {name: table[name].to_pylist() for name in ("sample_id", "context_hash", "advantage", "weight")}
    return [
        Sample(sample_id=columns["sample_id"][i], context_hash=columns["context_hash"][i], advantage=columns["advantage"][i],
               weight=columns["weight"][i], **{name: array[i].values.to_numpy() for name, array in arrays.items()})
        for i in range(len(table))]
