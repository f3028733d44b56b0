"""Records to Arrow and back: nothing is lost, changed or reordered."""

import pytest
from records import random_rollout, random_text, rng_of, turn_record

from pipelines.rows import GROUPS, ROLLOUTS, groups_to_table, rollouts_to_table, table_to_groups, table_to_rollouts, table_to_tasks, tasks_to_table
from rtpo_ray.types import Group, Rollout, Task


@pytest.mark.parametrize("seed", range(20))
def test_random_records_survive(seed):
    rng = rng_of(seed)
    rollouts = [random_rollout(rng, f"t{i}/0") for i in range(rng.randint(0, 5))]
    table = rollouts_to_table(rollouts)
    assert table.schema == ROLLOUTS and table_to_rollouts(table) == rollouts
    groups = []
    for i in range(rng.randint(0, 4)):
        siblings = tuple(random_rollout(rng, f"g{i}/{j}", boundaries=False) for j in range(rng.randint(0, 4)))
        groups.append(Group(group_id=random_text(rng), task_id=f"t{i}", turn=rng.choice((None, 0, 1, 4)), siblings=siblings))
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
