"""Records to Arrow and back: nothing is lost, changed or reordered."""

import pytest
from records import random_rollout, random_text, rng_of, turn_record

from pipelines.rows import (
    GROUPS,
    REQUESTS,
    ROLLOUTS,
    groups_to_table,
    requests_at,
    rollouts_to_table,
    table_to_groups,
    table_to_rollouts,
    table_to_tasks,
    tasks_to_table,
)
from rtpo_ray.types import Boundary, Group, Rollout, Task


@pytest.mark.parametrize("seed", range(20))
def test_random_records_survive(seed):
    rng = rng_of(seed)
    rollouts = [random_rollout(rng, f"t{i}/0") for i in range(rng.randint(0, 5))]
    table = rollouts_to_table(rollouts)
    assert table.schema == ROLLOUTS and table_to_rollouts(table) == rollouts
    groups = []
    for i in range(rng.randint(0, 4)):
        siblings = tuple(random_rollout(rng, f"g{i}/{j}", boundaries=False) for j in range(rng.randint(0, 4)))
        groups.append(Group(group_id=random_text(rng), task_id=f"t{i}", turn=rng.randrange(5), siblings=siblings))
    table = groups_to_table(groups)
    assert table.schema == GROUPS and table_to_groups(table) == groups
    payloads = [{random_text(rng): [rng.random(), None, random_text(rng)]} for _ in range(3)]
    tasks = [Task(task_id=random_text(rng), seed=rng.randrange(2**31), payload=payload) for payload in payloads]
    assert table_to_tasks(tasks_to_table(tasks)) == tasks


def test_log_probabilities_become_float32_and_token_ids_stay():
    rollout = Rollout(rollout_id="r", task_id="t", turns=(turn_record(response=(2**31 - 1, 0), engine_logprobs=(-0.1, -0.5)),))
    (back,) = table_to_rollouts(rollouts_to_table([rollout]))
    assert back.turns[0].response_ids == (2**31 - 1, 0)
    assert back.turns[0].engine_logprobs[1] == -0.5
    assert back.turns[0].engine_logprobs[0] == pytest.approx(-0.1, rel=1e-7) and back.turns[0].engine_logprobs[0] != -0.1


def test_rows_are_checked_again_when_they_are_read():
    table = rollouts_to_table([Rollout(rollout_id="r", task_id="t", turns=(turn_record(context=(1, 2)),))])
    row = table.to_pylist()[0]
    row["turns"][0]["context_ids"] = [1, 3]
    with pytest.raises(ValueError, match="context hash .* is not that of its 2 token ids"):
        table_to_rollouts(type(table).from_pylist([row], schema=ROLLOUTS))


def boundary(turn):
    return Boundary(turn=turn, context_hash=f"c{turn}", state_hash=f"s{turn}", snapshot=bytes([turn]))


def test_requests_are_the_boundaries_of_one_turn_in_the_order_of_the_trunks():
    trunks = rollouts_to_table([
        Rollout(rollout_id="a/0", task_id="a", turns=(), boundaries=(boundary(0), boundary(1))),
        Rollout(rollout_id="b/0", task_id="b", turns=(), boundaries=(boundary(0),)),
        Rollout(rollout_id="c/0", task_id="c", turns=(), end="failed", failure="x"),
        Rollout(rollout_id="c/1", task_id="c", turns=(), boundaries=(boundary(0), boundary(1), boundary(2)))])
    found = {turn: requests_at(trunks, turn) for turn in range(4)}
    assert all(table.schema == REQUESTS for table in found.values())
    assert [table["group_id"].to_pylist() for table in found.values()] == [["a/0/0", "b/0/0", "c/1/0"], ["a/0/1", "c/1/1"], ["c/1/2"], []]
    assert [Boundary(**row["boundary"]) for row in found[1].to_pylist()] == [boundary(1), boundary(1)]
    assert found[1]["task_id"].to_pylist() == ["a", "c"]
