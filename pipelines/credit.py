"""Groups to credited samples: plain functions from table to table."""

from __future__ import annotations

import math
import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.rows import SAMPLES, table_to_groups
from rtpo_ray.algorithms.base import Algorithm, Credit
from rtpo_ray.errors import MethodError
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
    capped = any(sibling.end == "capped" for sibling in group.siblings)  # its return is not known
    if failure or overlong or capped:
        outcome, reason = ("failed", failure) if failure else ("filtered", "overlong" if overlong else "capped")
        return [_row(group, sibling, outcome, reason) for sibling in group.siblings]
    credits, objective = _credits(algorithm, group), algorithm.objective
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


def _credits(algorithm: Algorithm, group: Group) -> list[Credit]:
    """What the method says, which may be a user's. Raises MethodError when it fails, and for what could only be trained wrongly."""
    who = f"{type(algorithm).__name__}.credit"
    try:
        credits = list(algorithm.credit(group))
    except Exception as error:  # a user's method may raise anything; the cause is chained
        raise MethodError(f"group {group.group_id} of {len(group.siblings)} siblings: {who} raised {type(error).__name__}: {error}") from error
    for credit in credits:
        if not isinstance(credit, Credit):
            raise MethodError(f"group {group.group_id}: {who} returned {credit!r}; expected a sequence of Credit")
        if not 0 <= credit.sibling < len(group.siblings):
            raise MethodError(f"group {group.group_id}: {who} names sibling {credit.sibling}, which is not there; expected 0 to "
                              f"{len(group.siblings) - 1}")
        where = f"group {group.group_id}, sibling {credit.sibling}, turn {credit.record.turn}: {who}"
        own = group.siblings[credit.sibling]
        if not any(record is credit.record for chain in group.siblings if chain is own or chain.rollout_id == own.parent for record in chain.turns):
            raise MethodError(f"{where} gave a record that is neither this sibling's nor its trunk's")
        if not math.isfinite(credit.advantage):
            raise MethodError(f"{where} gave the advantage {credit.advantage}; expected a finite number")
        if not 0 < credit.weight < math.inf:
            raise MethodError(f"{where} gave the weight {credit.weight}; expected a finite number above 0")
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
        "cached_prompt_tokens": sum(turn.cached_prompt_tokens for turn in new),
        "shareable_prompt_tokens": sum(turn.shareable_prompt_tokens for turn in new)}


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
