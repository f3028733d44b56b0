"""Trunks and stages through real Ray Data and real actors, with generators that need no model."""

import functools
import threading
import time

import pytest
import ray
from players import Gated, KillsAlways, KillsOnce, Player, Ragged, RaisesAlways, RaisesOnce, Shut, Spawn, Unborn, open_pool, status
from running import wait_until

from actors.cluster import root_cause
from actors.joining import joining
from actors.publisher import AsLoaded
from pipelines.collect import Ask, Collection, collect_episodes, count_rollouts, stage_samples
from pipelines.counts import StageCounts, count_stage
from pipelines.rows import unpack
from rtpo_ray import algorithms
from rtpo_ray.config import AlgorithmConfig
from rtpo_ray.errors import CoordinatorLost
from rtpo_ray.types import Task

TASKS = [Task(task_id=f"t{seed}", seed=seed) for seed in range(11)]  # of 1, 2, 3, 1, 2, 3 ... turns
SIBLINGS = 3


def collection(pool, retries=1, seconds=90):
    return Collection(pool=pool, version=0, retries=retries, deadline=time.time() + seconds, concurrency=8)


def trunks(pool, blocks, count=1, batch=TASKS, **options):
    ask = Ask(seed=1, temperature=1.0, count=count, keep_boundaries=True)
    return collect_episodes(batch, "trunks", ask, collection(pool, **options), blocks)


def stage(pool, made, turn, **options):
    method = AlgorithmConfig(args={"n_siblings": SIBLINGS})
    (found,) = [found for found in algorithms.build(method).stages(4) if found.turn == turn]
    return stage_samples(made, found, method, Ask(seed=2, temperature=1.0), collection(pool, **options))


def tables(blocks):
    return [unpack(ray.get(block)) for block in blocks]


def rows(blocks):
    return [row for table in tables(blocks) for row in table.to_pylist()]


def counts(found):
    return sum(map(count_stage, found), StageCounts())


def expected(turn, trunks_a_task=1):
    """Every sibling of `turn`, once."""
    return sorted(f"{task.task_id}/{i}/{turn}/{j}" for task in TASKS if task.seed % 3 >= turn for i in range(trunks_a_task) for j in range(SIBLINGS))


@pytest.fixture
def pool_of(cluster, tmp_path):
    """Makes a pool of generators that play `world`; one that misbehaves gets the test's folder to remember what it did."""

    def make(world=Ragged, count=2, kinds=(Player,), limits=None, **options):
        made = world if world is Ragged else functools.partial(world, str(tmp_path))
        return open_pool(Spawn(kinds, made, **options), count, **(limits or {}))

    return make


def test_no_row_is_lost_or_doubled(pool_of):
    pool = pool_of(count=3)
    for blocks, count in ((3, 1), (4, 1), (11, 2), (50, 1)):
        made = trunks(pool, blocks, count)
        totals = count_rollouts(made.to_arrow_refs(), 60)
        assert (totals.episodes, dict(totals.failed)) == (11 * count, {})
        assert dict(totals.boundaries) == {0: 11 * count, 1: 7 * count, 2: 3 * count}
        for turn in (2, 1, 0):
            found = tables(stage(pool, made, turn))
            assert sorted(row["rollout_id"] for table in found for row in table.to_pylist()) == expected(turn, count)
            total = counts(found)
            assert total.siblings == len(expected(turn, count)) == total.trained + total.filtered.total() and not total.failed
            assert total.groups * SIBLINGS == total.siblings and total.versions == {0}
        assert counts(tables(stage(pool, made, 3))) == StageCounts()  # a turn that nobody reached
    assert [(entry["state"], entry["leases"]) for entry in status(pool).values()] == [("serving", 0)] * 3


def test_blocks_arrive_while_others_still_sample(pool_of, tmp_path):
    pool = pool_of(Gated)
    (tmp_path / "open").touch()
    made = trunks(pool, 3)
    (tmp_path / "open").unlink()
    blocks = stage(pool, made, 0)
    first = unpack(ray.get(next(blocks), timeout=50)).to_pylist()  # the gate, and with it another block, is still shut
    assert first and not any(row["rollout_id"].startswith("t5/") for row in first)
    (tmp_path / "open").touch()
    assert sorted(row["rollout_id"] for row in [*first, *rows(blocks)]) == expected(0)


def test_a_failing_rollout_is_tried_again_elsewhere(pool_of, tmp_path):
    pool = pool_of(RaisesOnce)
    made = trunks(pool, 2)
    assert (tmp_path / "done").exists() and dict(count_rollouts(made.to_arrow_refs(), 60).failed) == {}
    (tmp_path / "done").unlink()
    found = tables(stage(pool, made, 1))
    assert (tmp_path / "done").exists() and not counts(found).failed
    assert sorted(row["rollout_id"] for table in found for row in table.to_pylist()) == expected(1)


def test_a_rollout_that_keeps_failing_costs_its_group_and_is_counted_with_its_message(pool_of, tmp_path):
    pool = pool_of(RaisesAlways)
    made = trunks(pool, 2, retries=2)
    totals = count_rollouts(made.to_arrow_refs(), 60)
    assert (totals.episodes, dict(totals.failed)) == (11, {"ValueError: a door is stuck": 1})
    assert dict(totals.boundaries) == {0: 10, 1: 6, 2: 2}  # all but those of the failed trunk
    failed, = [row for ref in made.to_arrow_refs() for row in ray.get(ref).to_pylist() if row["end"] == "failed"]
    assert (failed["task_id"], failed["failure"]) == ("t5", "ValueError: a door is stuck")
    total = counts(tables(stage(pool, made, 0)))
    assert (total.siblings, dict(total.failed)) == (10 * SIBLINGS, {})


def test_a_failed_sibling_fails_its_group_whole(pool_of, tmp_path):
    pool = pool_of(RaisesOnce)
    made = trunks(pool, 2)
    (tmp_path / "done").unlink()
    found = tables(stage(pool, made, 1, retries=0))
    total = counts(found)
    assert dict(total.failed) == {"ValueError: a door is stuck": SIBLINGS}
    assert total.siblings == len(expected(1)) == total.trained + total.filtered.total() + SIBLINGS
    lost = {row["group_id"] for table in found for row in table.to_pylist() if row["outcome"] == "failed"}
    assert lost == {"t5/0/1"}


def test_a_killed_generator_costs_no_rows(pool_of, tmp_path):
    pool = pool_of(KillsOnce)
    (tmp_path / "done").touch()
    made = trunks(pool, 4)
    (tmp_path / "done").unlink()
    assert sorted(row["rollout_id"] for row in rows(stage(pool, made, 0, retries=2))) == expected(0)
    assert (tmp_path / "done").exists()
    found = status(pool)
    states = {name: entry["state"] for name, entry in found.items()}
    victim, = [name for name, state in states.items() if state == "gone"]
    assert len(states) == 3 and states.pop(victim) and states.pop("rtpo-generator-2") in ("starting", "joining")  # the replacement
    assert set(states.values()) == {"serving"} and all(entry["leases"] == 0 for entry in found.values())
    assert "ActorDiedError" in next(entry["reason"] for entry in found.values() if entry["state"] == "gone")


def test_a_task_that_kills_every_generator_costs_its_block_and_says_so(pool_of):
    """Whoever is started in a dead one's place joins in the middle and is killed in its turn, as often as rows are retried."""
    pool = pool_of(KillsAlways, count=1)
    with joining(pool, lambda names: AsLoaded(pool).admit(0, names)):
        totals = count_rollouts(trunks(pool, 1, retries=2, seconds=100).to_arrow_refs(), 60)
    assert set(totals.ends) == {"failed"} and totals.ends["failed"] == totals.episodes
    (message,) = totals.failed
    assert message == "ActorDiedError: no generator survived it in 3 tries, last rtpo-generator-2"


def test_without_anyone_who_can_start_the_rollouts_are_lost_and_say_why(pool_of):
    pool = pool_of(KillsAlways, count=1, kinds=(Player, Unborn))
    totals = count_rollouts(trunks(pool, 1, retries=5, seconds=60).to_arrow_refs(), 60)
    assert set(totals.ends) == {"failed"} and totals.ends["failed"] == totals.episodes
    (message,) = totals.failed
    assert "NoGenerators" in message and "every generator is gone: rtpo-generator-0: ActorDiedError" in message
    assert {entry["state"] for entry in status(pool).values()} == {"gone"}


def test_a_pool_that_dies_in_the_middle_is_said_to_be_lost(pool_of):
    pool = pool_of(Shut)

    def kill():
        wait_until(lambda: any(entry["leases"] for entry in status(pool).values()), 30, "a lease")
        ray.kill(pool)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(CoordinatorLost, match="the generator pool died when it was asked "), root_cause():
        trunks(pool, 4)
    killing.join(30)


def test_whoever_comes_up_in_the_middle_of_a_stage_gets_a_part_of_it(pool_of, tmp_path):
    """One generator waits at the gate with all that it has room for; the second is asked for only then, and samples the rest."""
    pool = pool_of(Shut, count=1, limits={"most": 2, "each": 4})
    admitted = []

    def admit(names):
        AsLoaded(pool).admit(0, names)
        admitted.extend(names)
        wait_until(lambda: status(pool)["rtpo-generator-1"]["leases"], 30, "a lease of the one that came up")
        (tmp_path / "open").touch()

    with joining(pool, admit):
        assert ray.get(pool.resize.remote(11, False), timeout=30) == 2
        made = trunks(pool, 6)
    assert count_rollouts(made.to_arrow_refs(), 60).episodes == 11 and admitted == ["rtpo-generator-1"]


@pytest.mark.parametrize(("overlong", "failed", "ends"), [
    ("drop", {}, {"overlong": 11}),
    ("error", {"ValueError: the first context leaves no room for a response in generators.max_model_len (5); "
               "raise it, or set sampling.overlong=drop to count and skip such tasks": 11}, {"failed": 11}),
])
def test_overlong_tasks(pool_of, overlong, failed, ends):
    pool = pool_of(count=1, overlong=overlong, max_model_len=5)
    totals = count_rollouts(trunks(pool, 2, retries=0).to_arrow_refs(), 60)
    assert (dict(totals.failed), dict(totals.ends)) == (failed, ends)
