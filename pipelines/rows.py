"""Arrow schemas of the rows between pipeline steps, and the way from records to rows and back.

A group is one row: its siblings are a nested list, so grouping needs no shuffle.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rtpo_ray.types import Boundary, Group, Rollout, Task, TurnRecord

TURN = pa.struct({
    "turn": pa.int32(), "context_ids": pa.list_(pa.int32()), "context_hash": pa.string(), "response_ids": pa.list_(pa.int32()),
    "engine_logprobs": pa.list_(pa.float32()), "weight_version": pa.int64(), "seed": pa.int64(), "temperature": pa.float64(),
    "finish_reason": pa.string(), "observation": pa.string(), "reward": pa.float64(), "state_hash": pa.string(),
    "tool_calls": pa.int32(), "malformed_calls": pa.int32(), "failed_calls": pa.int32(), "cached_prompt_tokens": pa.int32(),
    "shareable_prompt_tokens": pa.int32(), "kind": pa.string(), "train_context_ids": pa.list_(pa.int32())})
BOUNDARY = pa.struct({"turn": pa.int32(), "context_hash": pa.string(), "state_hash": pa.string(), "snapshot": pa.binary()})
ROLLOUT = pa.struct({
    "rollout_id": pa.string(), "task_id": pa.string(), "turns": pa.list_(TURN), "boundaries": pa.list_(BOUNDARY),
    "end": pa.string(), "failure": pa.string(), "parent": pa.string(), "generator": pa.string()})

TASKS = pa.schema({"task_id": pa.string(), "seed": pa.int64(), "payload": pa.string()})
ROLLOUTS = pa.schema(list(ROLLOUT))
REQUESTS = pa.schema({
    "group_id": pa.string(), "task_id": pa.string(), "parent": pa.string(), "boundary": BOUNDARY,
    "count": pa.int32(),  # siblings; pilots, when there may be more
    "more": pa.int32(),  # siblings that may follow the pilots
    "explore": pa.float64(),  # probability that they do when the pilots' returns agree
    "expected_tokens": pa.int64(),  # that one sibling may generate, by what its trunk did: the longest are begun first
    "generator": pa.string()})  # that sampled its trunk, whose cache may still have the context
GROUPS = pa.schema({"group_id": pa.string(), "task_id": pa.string(), "turn": pa.int32(), "siblings": pa.list_(ROLLOUT), "pilots": pa.int32(),
                    "chance": pa.float64()})
SAMPLES = pa.schema({
    "sample_id": pa.string(), "rollout_id": pa.string(), "group_id": pa.string(),
    "first": pa.bool_(),  # of its rollout's rows: what is counted once a rollout stands here
    "outcome": pa.string(),  # trained | filtered | failed
    "reason": pa.string(),  # why filtered or failed
    "turn": pa.int32(), "reward": pa.float64(), "advantage": pa.float64(), "weight": pa.float64(), "return": pa.float64(),
    "turns": pa.int32(), "weight_version": pa.int64(),
    "context_ids": pa.list_(pa.int32()), "context_hash": pa.string(), "response_ids": pa.list_(pa.int32()),
    "engine_logprobs": pa.list_(pa.float32()), "generated_tokens": pa.int64(), "prompt_tokens": pa.int64(),
    "cached_prompt_tokens": pa.int64(), "shareable_prompt_tokens": pa.int64(), "credit_seconds": pa.float64()})


BLOCK = pa.schema({"samples": pa.list_(pa.struct(list(SAMPLES))), "episodes": pa.list_(ROLLOUT)})


def pack(samples: pa.Table, episodes: pa.Table | None = None) -> pa.Table:
    """SAMPLES rows, and the ROLLOUTS rows that they were made of where these are needed too, as one row, which Ray Data can hand on at once and
    cannot tear apart."""
    parts = [(samples, SAMPLES), (ROLLOUTS.empty_table() if episodes is None else episodes, ROLLOUTS)]
    return pa.Table.from_arrays([_one_list(table, schema) for table, schema in parts], schema=BLOCK)


def unpack(block: pa.Table, column: str = "samples") -> pa.Table:
    """The SAMPLES rows of a block, or its `episodes`."""
    if not len(block):  # an empty block has lost its columns on its way through Ray Data
        return (SAMPLES if column == "samples" else ROLLOUTS).empty_table()
    return pa.Table.from_struct_array(pc.list_flatten(block[column]))


def _one_list(table: pa.Table, schema: pa.Schema) -> pa.Array:
    """[1]: all rows."""
    rows = pa.StructArray.from_arrays([column.combine_chunks() for column in table.columns], fields=list(schema))
    return pa.ListArray.from_arrays([0, len(rows)], rows)


def _row(record: Any) -> dict[str, Any]:
    """One level of a dataclass as a dict; `dataclasses.asdict` would copy every token."""
    return {spec.name: getattr(record, spec.name) for spec in dataclasses.fields(record)}


def tasks_to_table(tasks: Sequence[Task]) -> pa.Table:
    return pa.Table.from_pylist([{**_row(task), "payload": json.dumps(task.payload)} for task in tasks], schema=TASKS)


def table_to_tasks(table: pa.Table) -> list[Task]:
    return [Task(**{**row, "payload": json.loads(row["payload"])}) for row in table.to_pylist()]


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    return {**_row(rollout), "turns": [_row(turn) for turn in rollout.turns], "boundaries": [_row(b) for b in rollout.boundaries]}


def rollout_from_row(row: dict[str, Any]) -> Rollout:
    """Rebuilds and so re-checks every turn record."""
    turns = tuple(TurnRecord(**_frozen(turn)) for turn in row["turns"])
    return Rollout(**{**row, "turns": turns, "boundaries": tuple(Boundary(**b) for b in row["boundaries"])})


def _frozen(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def rollouts_to_table(rollouts: Iterable[Rollout]) -> pa.Table:
    return pa.Table.from_pylist([_rollout_row(rollout) for rollout in rollouts], schema=ROLLOUTS)


def table_to_rollouts(table: pa.Table) -> list[Rollout]:
    return [rollout_from_row(row) for row in table.to_pylist()]


def groups_to_table(groups: Iterable[Group]) -> pa.Table:
    rows = [{**_row(group), "siblings": [_rollout_row(sibling) for sibling in group.siblings]} for group in groups]
    return pa.Table.from_pylist(rows, schema=GROUPS)


def table_to_groups(table: pa.Table) -> list[Group]:
    return [Group(**{**row, "siblings": tuple(rollout_from_row(sibling) for sibling in row["siblings"])}) for row in table.to_pylist()]
