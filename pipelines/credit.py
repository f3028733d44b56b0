"""Groups to credited samples: plain functions from table to table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.rows import SAMPLES, table_to_groups
from rtpo_ray.algorithms.base import Algorithm, Credit
from rtpo_ray.types import Group, Rollout, Sample, TurnRecord, context_hash


def credit_groups(groups: pa.Table, *, algorithm: Algorithm) -> pa.Table:
    """GROUPS rows to SAMPLES rows: one a credited response, and at least one a sibling, which says what became of it.

    A group with a failed sibling fails whole: its baseline would be biased by whatever made that one fail. A group without
    any advantage is filtered when its gradient is exactly 0.
    """
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for group in table_to_groups(groups):
        rows += _credit_one(group, algorithm)
    share = (time.perf_counter() - started) / max(1, len(rows))
    for row in rows:
        row["credit_seconds"] = share
    return pa.Table.from_pylist(rows, schema=SAMPLES)


def _credit_one(group: Group, algorithm: Algorithm) -> list[dict[str, Any]]:
    failure = next((sibling.failure or "failed without a message" for sibling in group.siblings if sibling.end == "failed"), "")
    overlong = any(sibling.end == "overlong" and not sibling.turns for sibling in group.siblings)
    if failure or overlong:
        outcome, reason = ("failed", failure) if failure else ("filtered", "overlong")
        return [_row(group, sibling, outcome, reason) for sibling in group.siblings]
    credits, objective = _checked(algorithm.credit(group), group), algorithm.objective
    rounding = 1e-12 * max(1.0, *(abs(sibling.returns_to_go) for sibling in group.siblings))
    if not (objective.needs_all or any(abs(credit.advantage) > rounding for credit in credits)):
        return [_row(group, sibling, "filtered", "zero_advantage") for sibling in group.siblings]
    if objective.continuation_clamp is not None:  # scored, so that the learner can weigh what followed the trained turn
        credits = [*credits, *(Credit(index, record, 0.0, 0.0) for index, sibling in enumerate(group.siblings)
                               for record in sibling.turns if record.turn != group.turn)]
    by_sibling: list[list[Credit]] = [[] for _ in group.siblings]
    for credit in credits:
        by_sibling[credit.sibling].append(credit)
    rows = []
    for sibling, own in zip(group.siblings, by_sibling, strict=True):
        if not own:  # a chain that says nothing, such as an empty prefix
            rows.append(_row(group, sibling, "filtered", "uncredited"))
        rows += [_row(group, sibling, "trained", "", credit, first=number == 0) for number, credit in enumerate(own)]
    return rows


def _checked(credits: Sequence[Credit], group: Group) -> Sequence[Credit]:
    """What a method made, which may be a user's. Raises ValueError for what could only be trained wrongly."""
    for credit in credits:
        where = f"group {group.group_id}, sibling {credit.sibling}, turn {credit.record.turn}"
        if not 0 <= credit.sibling < len(group.siblings):
            raise ValueError(f"{where}: credit names a sibling that is not there; expected 0 to {len(group.siblings) - 1}")
        if not math.isfinite(credit.advantage):
            raise ValueError(f"{where}: credit gave the advantage {credit.advantage}; expected a finite number")
        if not 0 < credit.weight < math.inf:
            raise ValueError(f"{where}: credit gave the weight {credit.weight}; expected a finite number above 0")
    return credits


def _row(group: Group, sibling: Rollout, outcome: str, reason: str, credit: Credit | None = None, first: bool = True) -> dict[str, Any]:
    """What is counted by rollout stands in its first row only; a rollout that another stage sampled cost nothing in this one."""
    record = credit.record if credit else None
    new = sibling.turns if first and sibling.parent else ()
    context = _train_context(record)
    return {
        "sample_id": f"{sibling.rollout_id}:{record.turn}{'s' if record.kind == 'summary' else ''}" if record else sibling.rollout_id,
        "rollout_id": sibling.rollout_id, "group_id": group.group_id, "first": first, "outcome": outcome, "reason": reason,
        "turn": record.turn if record else None, "reward": record.reward if record else 0.0,
        "advantage": credit.advantage if credit else 0.0, "weight": credit.weight if credit else 0.0,
        "return": sibling.returns_to_go, "turns": sum(turn.kind == "action" for turn in sibling.turns),
        "weight_version": (record or sibling.turns[0]).weight_version if sibling.turns else None,
        "context_ids": context, "context_hash": (context_hash(context) if record.train_context_ids else record.context_hash) if record else "",
        "response_ids": record.response_ids if record else (), "engine_logprobs": record.engine_logprobs if record else (),
        "generated_tokens": sum(len(turn.response_ids) for turn in new), "prompt_tokens": sum(len(turn.context_ids) for turn in new),
        "cached_prompt_tokens": sum(turn.cached_prompt_tokens for turn in new)}


def _train_context(record: TurnRecord | None) -> tuple[int, ...]:
    return () if record is None else record.train_context_ids or record.context_ids


def samples_to_train(table: pa.Table) -> list[Sample]:
    """The rows that the learner takes. Token arrays stay numpy views of the Arrow buffers."""
    if not len(table):  # an empty block has lost its columns on its way through Ray Data
        return []
    table = table.filter(pc.equal(table["outcome"], "trained"))
    arrays = {name: table[name].combine_chunks() for name in ("context_ids", "response_ids", "engine_logprobs")}
    columns = {name: table[name].to_pylist()
               for name in ("sample_id", "rollout_id", "group_id", "turn", "reward", "context_hash", "advantage", "weight")}
    return [
        Sample(**{name: column[i] for name, column in columns.items()}, **{name: array[i].values.to_numpy() for name, array in arrays.items()})
        for i in range(len(table))]
