"""Files of tasks: every kind is read to the same rows, and what is wrong is named with the file and the row."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from rtpo_ray.data import find_files, read_rows, to_fields
from rtpo_ray.errors import DataError

ROWS = [{"question": f"what is {i}?", "answer": str(i), "tags": ["a", "b"][: i % 3], "deep": {"x": i}} for i in range(5)]


def write(folder, kind, rows=ROWS):
    path = folder / f"part{kind}"
    if kind == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", ".arrow"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    assert list(read_rows(str(write(tmp_path, kind)))) == ROWS


def test_a_json_file_may_hold_a_row_a_line(tmp_path):
    (tmp_path / "a.json").write_text('{"x": 1}\n{"x": 2}\n')
    assert list(read_rows(str(tmp_path / "a.json"))) == [{"x": 1}, {"x": 2}]


def test_rows_of_json_keep_their_own_keys(tmp_path):
    """A table would give every row the keys of all."""
    rows = [{"config": {"a": 1}}, {"config": {"b": [2]}}]
    assert list(read_rows(str(write(tmp_path, ".jsonl", rows)))) == rows


def test_a_name_is_a_file_a_pattern_or_a_folder(tmp_path):
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    made = [str(write(folder, kind)) for kind in (".arrow", ".jsonl", ".parquet")]
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "README.md").write_text("about")
    assert find_files("data.train", str(tmp_path / "set")) == made
    assert find_files("data.train", str(folder / "*.jsonl")) == [made[1]]
    assert find_files("data.train", made[2]) == [made[2]]


@pytest.mark.parametrize(("name", "wrong"), [
    ("gone.jsonl", r"field data\.held_out is '.*gone\.jsonl': there is no such file in .*expected a file, a pattern or a folder of \.jsonl"),
    ("none-*.parquet", "there is no such file"),
    ("empty", "there is no such file"),
    ("a.csv", r"a\.csv is of a kind that is not read; expected \.jsonl, \.json, \.parquet, \.arrow"),
])
def test_files_that_are_missing_or_of_another_kind_are_named(tmp_path, name, wrong):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match=wrong):
        find_files("data.held_out", str(tmp_path / name))


@pytest.mark.parametrize(("name", "content", "wrong"), [
    ("a.jsonl", b'{"x": 1}\n{"x": \n', r"a\.jsonl, line 2 is no JSON: Expecting value at character"),
    ("a.jsonl", b'{"x": 1}\n[1]\n', r"line 2 is '\[1\]'; expected an object"),
    ("a.json", b"[1, 2", r"a\.json is no JSON"),
    ("a.json", b'[{"x": 1}, 3]', r"row 1 is '3'; expected an object"),
    ("a.parquet", b"PAR", r"a\.parquet cannot be read as Parquet"),
    ("a.arrow", b"ARROW1", r"a\.arrow cannot be read as a stream of Arrow"),
])
def test_files_that_are_broken_are_named(tmp_path, name, content, wrong):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=wrong):
        list(read_rows(str(tmp_path / name)))


def test_columns_are_mapped_to_fields_and_others_left_out():
    assert to_fields(ROWS[1], {"text": "question"}, ("text", "answer"), "f") == {"text": "what is 1?", "answer": "1"}


def test_a_missing_or_empty_column_is_named_with_those_that_exist():
    with pytest.raises(DataError, match=r"f, row 3 has no column 'problem', which the environment reads as its field question; it has question, "
                                        r"answer, tags, deep\. Say which one it is: data\.fields\.question=COLUMN"):
        to_fields(ROWS[0], {"question": "problem"}, ("question",), "f, row 3")
    with pytest.raises(DataError, match="column 'answer', which the environment reads as its field answer, holds nothing"):
        to_fields({"answer": None}, {}, ("answer",), "f, row 3")
