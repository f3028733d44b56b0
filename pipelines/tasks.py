"""Tasks of a run: which ones a sweep gets depends on the run's seed and the sweep's number alone, so a resumed run continues the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import ray.data

from pipelines.rows import tasks_to_table
from rtpo_ray.types import Task, derive_seed


def training_tasks(run_seed: int, sweep: int, count: int) -> list[Task]:
    """The `count` tasks of a sweep; every task of a run is used once."""
    indices = range(sweep * count, (sweep + 1) * count)
    return [Task(task_id=f"train-{index}", seed=derive_seed(run_seed, "train", index)) for index in indices]


def held_out_tasks(count: int) -> list[Task]:
    """The first `count` held-out tasks, the same for every run seed so that runs can be compared."""
    return [Task(task_id=f"held-out-{index}", seed=derive_seed("held-out", index)) for index in range(count)]


def dataset(tasks: Sequence[Task], blocks: int) -> ray.data.Dataset:
    """Tasks as a Ray Dataset of up to `blocks` blocks of nearly equal size; each block becomes one lease of a generator.

    `from_items` makes its blocks here; `from_arrow` would ask for a CPU, and all may belong to the learner and the generators.
    """
    return ray.data.from_items(tasks_to_table(tasks).to_pylist(), override_num_blocks=max(1, min(blocks, len(tasks))))
