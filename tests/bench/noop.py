"""A generator that answers at once with copies of one rollout, and a learner rank that only counts."""

import pyarrow as pa

from pipelines.counts import count_stage
from pipelines.rows import GROUPS, ROLLOUT, ROLLOUTS, rollouts_to_table, unpack
from rtpo_ray.types import Boundary, Rollout, TurnRecord, context_hash

CONTEXT, RESPONSE = tuple(range(200, 264)), tuple(range(16))


def template(reward: float, keep: bool) -> pa.StructArray:
    """One rollout of one turn as a struct array [1]; with a boundary if `keep`."""
    turn = TurnRecord(turn=0, context_ids=CONTEXT, context_hash=context_hash(CONTEXT), response_ids=RESPONSE, engine_logprobs=(-1.0,) * len(RESPONSE),
                      weight_version=0, seed=0, temperature=1.0, finish_reason="stop", observation="", reward=reward, state_hash="s")
    boundary = Boundary(turn=0, context_hash=turn.context_hash, state_hash="s", snapshot=bytes(256))
    made = Rollout(rollout_id="r", task_id="t", turns=(turn,), boundaries=(boundary,) if keep else (), end="terminated")
    return rollouts_to_table([made]).to_struct_array().combine_chunks()


def copies(source: pa.Array, picks: list[int], rollout_ids: list[str], task_ids: list[str], parents: list[str]) -> pa.StructArray:
    taken = source.take(pa.array(picks, pa.int64()))
    columns = {name: taken.field(name) for name in ROLLOUTS.names}
    columns |= {"rollout_id": pa.array(rollout_ids), "task_id": pa.array(task_ids), "parent": pa.array(parents, pa.string())}
    return pa.StructArray.from_arrays([columns[field.name] for field in ROLLOUT], fields=list(ROLLOUT))


class NoopGenerator:
    async def ready(self):
        return "here"

    async def alive(self):
        return 0.0

    async def take_occupancy(self):
        return {"slots": 1.0, "slot_seconds": 0.0, "open_seconds": 0.0, "demand_seconds": 0.0}

    async def episodes(self, tasks, ask):
        ids = [task for task in tasks["task_id"].to_pylist() for _ in range(ask.count)]
        names = [f"{task}/{number % ask.count}" for number, task in enumerate(ids)]
        made = copies(template(1.0, True), [0] * len(ids), names, ids, [""] * len(ids))
        return pa.Table.from_arrays([made.field(name) for name in ROLLOUTS.names], schema=ROLLOUTS)

    async def siblings(self, requests, ask):
        source = pa.concat_arrays([template(0.0, False), template(1.0, False)])
        counts, groups = requests["count"].to_pylist(), requests["group_id"].to_pylist()
        owners = [number for number, count in enumerate(counts) for _ in range(count)]
        tasks, parents = requests["task_id"].to_pylist(), requests["parent"].to_pylist()
        made = copies(source, [index % 2 for index in range(len(owners))], [f"{groups[owner]}/{index}" for index, owner in enumerate(owners)],
                      [tasks[owner] for owner in owners], [parents[owner] for owner in owners])
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        turns = pa.array([0] * len(groups), pa.int32())
        return pa.Table.from_arrays([requests["group_id"].combine_chunks(), requests["task_id"].combine_chunks(), turns,
                                     pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), made), pa.array([0] * len(groups), pa.int32()),
                                     pa.array([1.0] * len(groups), pa.float64())], schema=GROUPS)


class NoopRank:
    def receive(self, block):
        return count_stage(unpack(block))


