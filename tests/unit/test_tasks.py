"""Tasks of a run: decided by seed and sweep alone, each used once, never a held-out one."""

from pipelines.tasks import SeedTasks
from rtpo_ray.types import Task, derive_seed


def test_a_sweep_is_decided_by_seed_and_number():
    assert SeedTasks(3).training(5, 2) == SeedTasks(3).training(5, 2) == [
        Task(task_id="train-10", seed=derive_seed(3, "train", 10)), Task(task_id="train-11", seed=derive_seed(3, "train", 11))]
    assert [task.seed for task in SeedTasks(4).training(5, 2)] != [task.seed for task in SeedTasks(3).training(5, 2)]


def test_a_resumed_run_continues_the_sequence():
    whole = [task for sweep in range(6) for task in SeedTasks(0).training(sweep, 7)]
    resumed = [task for sweep in range(3, 6) for task in SeedTasks(0).training(sweep, 7)]
    assert whole[21:] == resumed
    assert [task.task_id for task in whole] == [f"train-{i}" for i in range(42)]
    assert len({task.seed for task in whole}) == 42


def test_held_out_tasks_are_the_same_for_every_run_and_none_is_trained_on():
    assert SeedTasks(0).held_out(3) == SeedTasks(0).held_out(5)[:3]
    assert SeedTasks(0).held_out(0) == []
    held_out = SeedTasks(0).held_out(256)
    trained = [task for seed in range(3) for sweep in range(20) for task in SeedTasks(seed).training(sweep, 64)]
    assert len({task.seed for task in held_out}) == 256
    assert {task.seed for task in held_out} & {task.seed for task in trained} == set()
    assert {task.task_id for task in held_out} & {task.task_id for task in trained} == set()
