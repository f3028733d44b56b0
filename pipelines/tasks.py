"""Tasks of a run, made from seeds or read from files. Which ones a sweep gets depends on the run's seed and the sweep's number alone, so a resumed
run continues the sequence."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa
import ray
import ray.data

from pipelines.rows import tasks_to_table
from rtpo_ray.config import Config, DataConfig
from rtpo_ray.data import find_files, read_rows, to_fields
from rtpo_ray.errors import DataError
from rtpo_ray.types import Task, derive_seed


class TaskSource(Protocol):
    """Where tasks come from."""

    def training(self, sweep: int, count: int) -> list[Task]:
        """The `count` tasks of a sweep."""

    def held_out(self, count: int) -> list[Task]:
        """At most `count` held-out tasks, the same for every run seed so that runs can be compared."""

    def fingerprints(self) -> dict[str, str]:
        """What the tasks are made of, by field of the configuration: a run that goes on must find the same."""


class SeedTasks:
    """The environment makes a task from its seed; every task of a run is used once."""

    def __init__(self, run_seed: int) -> None:
        self._seed = run_seed

    def training(self, sweep: int, count: int) -> list[Task]:
        indices = range(sweep * count, (sweep + 1) * count)
        return [Task(task_id=f"train-{index}", seed=derive_seed(self._seed, "train", index)) for index in indices]

    def held_out(self, count: int) -> list[Task]:
        return [Task(task_id=f"held-out-{index}", seed=derive_seed("held-out", index)) for index in range(count)]

    def fingerprints(self) -> dict[str, str]:
        return {}


class FileTasks:
    """One row of a file a task. Training goes through them in epochs, each in an order of its own; a sweep may straddle two of them.

    Args:
    data: which files, and which columns.
    fields: that the environment reads.
    home: id of the node on which they are read and kept; empty: any.
    timeout: seconds that reading may take.
    """

    def __init__(self, data: DataConfig, fields: Sequence[str], run_seed: int, home: str = "", timeout: float = 600.0) -> None:
        self._data, self._seed = data, run_seed
        self._open = functools.cache(lambda field: Rows(field, getattr(data, field.partition(".")[2]), data.fields, fields, home, timeout))
        self._order = functools.lru_cache(maxsize=2)(self._make_order)  # a sweep straddles two epochs at most, unless it holds several

    def training(self, sweep: int, count: int) -> list[Task]:
        rows, use = self._open("data.train"), self._split[0]
        places = [divmod(position, len(use)) for position in range(sweep * count, (sweep + 1) * count)]
        indices = [use[self._order(epoch, len(use))[place]] for epoch, place in places]
        return [Task(task_id=f"train-{index}" if epoch == 0 else f"train-{index}-epoch-{epoch}", seed=derive_seed(self._seed, "train", epoch, index),
                     payload=row)
                for (epoch, _), index, row in zip(places, indices, rows.take(indices), strict=True)]

    def held_out(self, count: int) -> list[Task]:
        rows = self._open("data.held_out" if self._data.held_out else "data.train")
        use = _shuffled("held-out", len(rows)) if self._data.held_out else self._split[1]
        indices = sorted(use[:count])
        return [Task(task_id=f"held-out-{index}", seed=derive_seed("held-out", index), payload=row)
                for index, row in zip(indices, rows.take(indices), strict=True)]

    def fingerprints(self) -> dict[str, str]:
        return {field: self._open(field).fingerprint for field in ("data.train", "data.held_out") if getattr(self._data, field.partition(".")[2])}

    @functools.cached_property
    def _split(self) -> tuple[list[int], list[int]]:
        """The rows of data.train to train on, in the file's order, and those held out of it, at random: the same for every run seed."""
        count = len(self._open("data.train"))
        if self._data.held_out:
            return list(range(count)), []
        apart = max(1, round(count * self._data.held_out_share)) if self._data.held_out_share else 0
        order = _shuffled("held-out", count)
        if apart == count:
            raise DataError(f"field data.held_out_share is {self._data.held_out_share}: of {count} rows of data.train none is left to train on")
        return sorted(order[apart:]), order[:apart]

    def _make_order(self, epoch: int, count: int) -> Sequence[int]:
        return _shuffled("epoch", count, self._seed, epoch) if self._data.shuffle else range(count)


class Rows:
    """The rows of some files, in their order, each as JSON, in the object store. Raises DataError when a file or a column is missing."""

    def __init__(self, field: str, name: str, columns: dict[str, str], fields: Sequence[str], home: str, timeout: float) -> None:
        self._stay: dict[str, Any] = {"label_selector": {"ray.io/node-id": home}} if home else {}
        self._timeout = timeout
        files = find_files(field, name)
        read = ray.data.from_items([{"file": file, "number": number} for number, file in enumerate(files)], override_num_blocks=len(files))
        found = read.map_batches(_read, fn_kwargs={"columns": columns, "fields": tuple(fields)}, batch_format="pyarrow", batch_size=1,
                                num_cpus=0, concurrency=min(len(files), 4), **self._stay)
        found.set_name("data")
        self._blocks = found.materialize().to_arrow_refs()
        places = sorted((*place, number) for number, place in enumerate(self._places()) if place)  # blocks come as they are ready
        self._ordered = [(number, size) for *_, size, _, number in places]
        self.fingerprint = hashlib.blake2b(repr([place[:-1] for place in places]).encode(), digest_size=8).hexdigest()
        self._ends = list(itertools.accumulate(size for _, size in self._ordered))
        if not self._ends:
            raise DataError(f"field {field} is {name!r}: its files hold no row")

    def __len__(self) -> int:
        return self._ends[-1]

    def take(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers."""
        wanted: dict[int, list[int]] = {}
        places = []
        for index in indices:
            at = bisect.bisect_right(self._ends, index)
            block, size = self._ordered[at]
            places.append((block, len(wanted.setdefault(block, []))))
            wanted[block].append(index - (self._ends[at] - size))
        pick = ray.remote(num_cpus=0, **self._stay)(_pick)
        parts = ray.get([pick.remote(self._blocks[block], offsets) for block, offsets in wanted.items()], timeout=self._timeout)
        found = dict(zip(wanted, parts, strict=True))
        return [json.loads(found[block][place]) for block, place in places]

    def _places(self) -> list[tuple[int, ...]]:
        look = ray.remote(num_cpus=0, **self._stay)(_place)
        places: list[tuple[int, ...]] = ray.get([look.remote(block) for block in self._blocks], timeout=self._timeout)
        return places


def source_of(config: Config, fields: Sequence[str], home: str) -> TaskSource:
    """Of the configured tasks; `fields`: that the environment reads."""
    if not (config.data.train or config.data.held_out):
        return SeedTasks(config.run.seed)
    return FileTasks(config.data, fields, config.run.seed, home, config.sampling.stage_timeout)


def dataset(tasks: Sequence[Task], blocks: int) -> ray.data.Dataset:
    """Tasks as a Ray Dataset of up to `blocks` blocks of nearly equal size; each block becomes one lease of a generator.

    `from_items` makes its blocks here; `from_arrow` would ask for a CPU, and all may belong to the learner and the generators.
    """
    return ray.data.from_items(tasks_to_table(tasks).to_pylist(), override_num_blocks=max(1, min(blocks, len(tasks))))


def _read(files: pa.Table, *, columns: dict[str, str], fields: tuple[str, ...]) -> Iterator[pa.Table]:
    """(file, number) to (number, place, row) rows: the file's number, the row's place in it, its fields as JSON."""
    for file, number in zip(files["file"].to_pylist(), files["number"].to_pylist(), strict=True):
        rows = [json.dumps(to_fields(row, columns, fields, f"{file}, row {place}"), default=str) for place, row in enumerate(read_rows(file))]
        if rows:
            yield pa.table({"number": [number] * len(rows), "place": range(len(rows)), "row": rows})


def _place(block: pa.Table) -> tuple[int, ...]:
    """(number of the file, where in it the block begins, how many rows it has, hash of the rows); nothing for an empty one, which has lost its
    columns."""
    if not len(block):
        return ()
    rows = hashlib.blake2b("\n".join(block["row"].to_pylist()).encode(), digest_size=8)
    return block["number"][0].as_py(), block["place"][0].as_py(), len(block), int.from_bytes(rows.digest(), "big")


def _pick(block: pa.Table, offsets: list[int]) -> list[str]:
    found: list[str] = block["row"].take(offsets).to_pylist()
    return found


def _shuffled(purpose: str, count: int, *where: int) -> list[int]:
    return random.Random(derive_seed(purpose, *where)).sample(range(count), count)
