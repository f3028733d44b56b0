"""Tasks out of files, through real Ray Data: every row once an epoch, in an order that seed and sweep decide."""

import json

import pyarrow as pa
import pytest
import ray
from pyarrow import parquet

from actors.cluster import root_cause
from pipelines.tasks import FileTasks, Rows, SeedTasks, source_of
from rtpo_ray.config import Config, DataConfig
from rtpo_ray.errors import DataError

ROWS = [{"problem": f"what is {i}?", "answer": i, "level": i % 5} for i in range(23)]


@pytest.fixture
def files(tmp_path, ray_cluster):
    """23 rows in three files of two kinds."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:9]))
    parquet.write_table(pa.Table.from_pylist(ROWS[9:20]), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[20:]))
    return tmp_path


def source(files, seed=3, **data):
    return FileTasks(DataConfig(train=str(files), fields={"question": "problem"}, **data), ("question", "answer"), seed)


def numbers(tasks):
    """The rows that tasks hold, after a look at their whole content."""
    for task in tasks:
        assert task.payload == {"question": f"what is {task.payload['answer']}?", "answer": task.payload["answer"]}
    return [task.payload["answer"] for task in tasks]


def test_rows_keep_the_order_of_the_files(files):
    rows = Rows("data.train", str(files), {"question": "problem"}, ("answer",), "", 60)
    assert len(rows) == 23
    assert [row["answer"] for row in rows.take(range(23))] == list(range(23))
    assert [row["answer"] for row in rows.take([22, 0, 0, 9])] == [22, 0, 0, 9]
    home = ray.get_runtime_context().get_node_id()
    assert Rows("data.train", str(files), {"question": "problem"}, ("answer",), home, 60).take([20]) == [{"answer": 20}]


def test_every_epoch_holds_every_row_once_and_goes_on_across_sweeps(files):
    whole = [task for sweep in range(7) for task in source(files).training(sweep, 10)]  # 70 = 3 epochs and a bit
    assert [task for sweep in (3, 4) for task in source(files).training(sweep, 10)] == whole[30:50]  # as a resumed run
    epochs = [numbers(whole[start:start + 23]) for start in (0, 23, 46)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3 and list(range(23)) not in epochs
    assert len({task.task_id for task in whole}) == len({task.seed for task in whole}) == 70
    assert numbers(source(files, seed=4).training(0, 23)) != epochs[0]
    assert numbers(source(files, shuffle=False).training(1, 15)) == [*range(15, 23), *range(7)]


def test_fingerprints_are_those_of_the_rows(files):
    before = source(files).fingerprints()
    assert before == source(files, seed=9).fingerprints() and before.keys() == {"data.train"}
    with (files / "c.jsonl").open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert source(files).fingerprints() != before
    both = source(files, held_out=str(files / "c.jsonl")).fingerprints()
    assert both.keys() == {"data.train", "data.held_out"} and both["data.train"] == source(files).fingerprints()["data.train"]


def test_a_batch_larger_than_the_files_goes_through_them_more_than_once(files):
    tasks = source(files).training(0, 50)
    assert sorted(numbers(tasks)) == sorted([*range(23)] * 2 + numbers(tasks[46:])) and len({task.task_id for task in tasks}) == 50


def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(files):
    one, two = (source(files, seed=seed, held_out_share=0.3) for seed in (1, 2))
    assert one.held_out(100) == two.held_out(100)
    held_out = numbers(one.held_out(100))
    assert len(held_out) == 7
    assert sorted(held_out + numbers(one.training(0, 16))) == list(range(23))
    assert set(numbers(one.held_out(3))) < set(held_out) and len(one.held_out(3)) == 3
    other = source(files, held_out=str(files / "c.jsonl"))
    assert numbers(other.held_out(9)) == [20, 21, 22] and len(set(numbers(other.training(0, 23)))) == 23
    with pytest.raises(DataError, match=r"data\.held_out_share is 1\.0: of 23 rows of data\.train none is left"):
        source(files, held_out_share=1.0).training(0, 2)


def test_what_is_wrong_with_a_file_is_said_with_its_name_and_columns(files):
    with pytest.raises(DataError, match=r"row 0 has no column 'question'.*it has problem, answer, level.*data\.fields\.question=COLUMN"), \
            root_cause():
        FileTasks(DataConfig(train=str(files)), ("question",), 0).training(0, 2)
    (files / "c.jsonl").write_text("")
    assert len(Rows("data.train", str(files), {}, ("answer",), "", 60)) == 20
    with pytest.raises(DataError, match=r"field data\.train is '.*c\.jsonl': its files hold no row"):
        Rows("data.train", str(files / "c.jsonl"), {}, ("answer",), "", 60)
    with pytest.raises(DataError, match="no such file"):
        source(files / "gone").training(0, 2)


def test_the_configuration_decides_where_tasks_come_from(files):
    assert isinstance(source_of(Config(), (), ""), SeedTasks)
    config = Config()
    config.data = DataConfig(train=str(files), held_out_share=0.5)
    assert source_of(config, ("answer",), "").held_out(1)[0].payload.keys() == {"answer"}
