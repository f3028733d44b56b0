"""Files of tasks: one row a task, its columns mapped to the fields that an environment reads.

    files = find_files("data.train", "MATH/data/train-*.parquet")
    for row in read_rows(files[0]):
        to_fields(row, {"question": "problem"}, ("question", "answer"), files[0])      # {"question": ..., "answer": ...}
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rtpo_ray.errors import DataError

Row = dict[str, Any]


def find_files(field: str, name: str) -> list[str]:
    """The files that `name`, of the configuration's `field`, stands for: a file, a pattern, or a folder, which may be one of Hugging Face.

    Raises DataError when there is none, or one of a kind that is not read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(str(file) for kind in READERS for file in path.rglob(f"*{kind}") if not _is_description(file))
        splits = sorted({part for file in found for part in SPLITS.findall(str(Path(file).relative_to(path)))})
        if len(splits) > 1:
            raise DataError(f"field {field} is {name!r}, a folder of several splits ({', '.join(splits)}); name the files of one, for example by a "
                            f"pattern such as {name}/**/*{splits[0]}*")
    elif path.is_file():
        found = [str(path)]
    else:
        found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise DataError(f"field {field} is {name!r}: there is no such file in {Path.cwd()}; expected a file, a pattern or a folder of "
                        f"{', '.join(READERS)} files, on a cluster on a path that every node sees")
    for file in found:
        if Path(file).suffix not in READERS:
            raise DataError(f"field {field} is {name!r}: {file} is of a kind that is not read; expected {', '.join(READERS)}")
    return [str(Path(file).resolve()) for file in found]


SPLITS = re.compile(r"(?:^|/)(train|test|validation|valid|dev|eval)(?=[-_./])")


def _is_description(file: Path) -> bool:
    """What Hugging Face writes beside the data."""
    return file.name in ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json") or file.name.startswith("cache-")


def read_rows(file: str) -> Iterator[Row]:
    """The rows of one file, in order. Raises DataError when it cannot be read."""
    yield from READERS[Path(file).suffix](file)


def to_fields(row: Row, columns: Mapping[str, str], fields: Sequence[str], where: str) -> Row:
    """The `fields` of an environment out of a row; `columns` names the column of those that are called otherwise.

    Raises DataError when a column is missing, naming those that exist, or empty.
    """
    found = {}
    for field in fields:
        column = columns.get(field, field)
        if column not in row:
            raise DataError(f"{where} has no column {column!r}, which the environment reads as its field {field}; it has {', '.join(row)}. Say which "
                            f"one it is: data.fields.{field}=COLUMN")
        if row[column] is None:
            raise DataError(f"{where}: column {column!r}, which the environment reads as its field {field}, holds nothing")
        found[field] = row[column]
    return found


def _read_jsonl(file: str) -> Iterator[Row]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _object(line, f"{file}, line {number}")


def _read_json(file: str) -> Iterator[Row]:
    """A list of rows, or one row a line."""
    text = Path(file).read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(file)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is no JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number} is {str(row)[:60]!r}; expected an object")
        yield row


def _object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is no JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is {line.strip()[:60]!r}; expected an object")
    return row


def _read_parquet(file: str) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches(1024):
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _read_arrow(file: str) -> Iterator[Row]:
    """What `save_to_disk` of Hugging Face's datasets writes: a stream."""
    import pyarrow as pa

    try:
        with pa.memory_map(file) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{file} cannot be read as a stream of Arrow: {error}") from error


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".arrow": _read_arrow}
