"""Trunks to sibling requests, and trunks with their siblings to groups: plain functions from table to table.

All trunks of a task lie in one block, so no step here needs a shuffle.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, replace

import pyarrow as pa

from pipelines.rows import REQUESTS, groups_to_table, table_to_groups, table_to_rollouts
from rtpo_ray.algorithms.base import Algorithm, Branch, Stage
from rtpo_ray.errors import MethodError
from rtpo_ray.types import Group, Rollout, derive_seed


def requests(trunks: pa.Table, stage: Stage, algorithm: Algorithm, seed: int) -> pa.Table:
    """REQUESTS rows: where siblings of these trunks start. Failed trunks have none."""
    if not algorithm.branching:
        return REQUESTS.empty_table()
    rows = []
    for task_id, rollouts in _by_task(table_to_rollouts(trunks)):
        alive = [trunk for trunk in rollouts if trunk.boundaries and trunk.end != "failed"]
        for branch in _branches(algorithm, stage, alive, derive_seed(seed, "branches", task_id)):
            trunk = alive[branch.trunk]
            boundary = next((boundary for boundary in trunk.boundaries if boundary.turn == branch.turn), None)
            if boundary is None:
                raise MethodError(f"task {task_id}: {type(algorithm).__name__}.branches names turn {branch.turn} of trunk {branch.trunk}, whose "
                                  f"boundaries are at turns {[boundary.turn for boundary in trunk.boundaries]}")
            if branch.count:
                ahead = sum(len(record.response_ids) for record in trunk.turns if record.turn >= branch.turn)
                rows.append({"group_id": f"{trunk.rollout_id}/{branch.turn}", "task_id": task_id, "parent": trunk.rollout_id, "count": branch.count,
                             "more": branch.more, "explore": branch.explore, "expected_tokens": ahead, "generator": trunk.generator,
                             "boundary": asdict(boundary)})
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def _branches(algorithm: Algorithm, stage: Stage, trunks: list[Rollout], seed: int) -> list[Branch]:
    """What the method says, which may be a user's. Raises MethodError."""
    who = f"{type(algorithm).__name__}.branches"
    try:
        branches = list(algorithm.branches(stage, trunks, random.Random(seed)))
    except Exception as error:  # a user's method may raise anything; the cause is chained
        raise MethodError(f"{who} raised {type(error).__name__} on {len(trunks)} trunks: {error}") from error
    for branch in branches:
        if not isinstance(branch, Branch) or not 0 <= branch.trunk < len(trunks) or branch.count < 0:
            raise MethodError(f"{who} returned {branch!r}; expected a Branch of one of {len(trunks)} trunks, and a count of 0 or more")
    return branches


def assemble(trunks: pa.Table, branches: pa.Table, stage: Stage) -> pa.Table:
    """GROUPS rows of a stage, from its trunks (ROLLOUTS) and the siblings sampled at its boundaries (GROUPS, one row a boundary)."""
    if stage.baseline == "boundary" and not stage.merge and not stage.with_trunk:
        return branches
    rollouts, made = table_to_rollouts(trunks), table_to_groups(branches)
    if stage.baseline == "boundary":
        return groups_to_table(_of_boundaries({trunk.rollout_id: trunk for trunk in rollouts}, made, stage))
    grown: dict[str, list[Rollout]] = {}
    for branch in made:
        grown.setdefault(branch.task_id, []).extend(branch.siblings)
    return groups_to_table(
        Group(group_id=task_id, task_id=task_id, turn=None,
              siblings=(*(replace(trunk, boundaries=()) for trunk in members if stage.with_trunk), *grown.get(task_id, ())))
        for task_id, members in _by_task(rollouts))


def _of_boundaries(trunks: dict[str, Rollout], made: list[Group], stage: Stage) -> list[Group]:
    """One group a boundary, or one for all boundaries of a task with the same context and state."""
    groups: dict[tuple[str, ...], Group] = {}
    for group in made:
        trunk = trunks[group.group_id.rpartition("/")[0]]
        boundary = next(boundary for boundary in trunk.boundaries if boundary.turn == group.turn)
        siblings = (*((_from(trunk, boundary.turn),) if stage.with_trunk else ()), *group.siblings)
        key = (group.task_id, boundary.context_hash, boundary.state_hash) if stage.merge else (group.group_id,)
        groups[key] = replace(groups[key], siblings=(*groups[key].siblings, *siblings)) if key in groups else replace(group, siblings=siblings)
    return list(groups.values())


def _from(trunk: Rollout, turn: int) -> Rollout:
    """The trunk's own continuation of its boundary at `turn`, as one more sibling."""
    return replace(trunk, rollout_id=f"{trunk.rollout_id}/{turn}/trunk", boundaries=(), turns=tuple(r for r in trunk.turns if r.turn >= turn))


def _by_task(rollouts: list[Rollout]) -> Iterable[tuple[str, list[Rollout]]]:
    tasks: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        tasks.setdefault(rollout.task_id, []).append(rollout)
    return tasks.items()
