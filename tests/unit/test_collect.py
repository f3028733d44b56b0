"""A sampling step on fakes of Ray, pool and generators: retries elsewhere, nothing lost and nothing twice."""

import time
import types
from dataclasses import replace

import pyarrow as pa
import pytest
import ray.data
from ray.data._internal.logical.interfaces import LogicalPlan
from ray.data._internal.logical.operators import InputData
from ray.data._internal.stats import DatasetStats
from ray.data.dataset import MaterializedDataset
from ray.exceptions import GetTimeoutError, RayActorError
from records import failed, group, sibling, trunk

from actors.pool import Lease
from pipelines import collect
from pipelines.collect import Ask, Collection, sample
from pipelines.rows import REQUESTS, groups_to_table, rollouts_to_table, table_to_groups, table_to_rollouts, tasks_to_table, unpack
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import AlgorithmConfig
from rtpo_ray.errors import ConservationError, DeadlineExceeded, NoGenerators
from rtpo_ray.types import Rollout, Task


def remote(function):
    return types.SimpleNamespace(remote=lambda *args: lambda: function(*args))


class Stream:
    """What a streaming call of an actor returns: references, one a part. `error` comes after the parts in the place of the next one."""

    def __init__(self, parts, error=None):
        self._refs = [*((lambda part=part: part) for part in parts), *([self._raise(error)] if error else [])]

    @staticmethod
    def _raise(error):
        def ref():
            raise error
        return ref

    def __next__(self):
        if not self._refs:
            raise StopIteration
        return self._refs.pop(0)


def streaming(function):
    return types.SimpleNamespace(remote=lambda *args: function(*args))


class Generator:
    """Makes one rollout a trunk or sibling; those in `broken` fail, and `error` replaces the whole answer, or what comes after `parts` groups.

    `extended`: groups whose pilots are followed by others.
    """

    def __init__(self, broken=(), error=None, parts=0, extended=()):
        self.broken, self.error, self.asked, self.parts, self.extended = broken, error, [], parts, extended
        self.episodes, self.siblings = remote(self._episodes), streaming(self._stream)

    def _one(self, name, task_id):
        made = failed(name, "E: lost") if name in self.broken else sibling(name, 1.0)
        return Rollout(rollout_id=name, task_id=task_id, turns=made.turns, end=made.end, failure=made.failure)

    def _episodes(self, tasks, ask):
        self.asked.append(tasks["task_id"].to_pylist())
        if self.error:
            raise self.error
        return rollouts_to_table([self._one(f"{task}/{j}", task) for task in tasks["task_id"].to_pylist() for j in range(ask.count)])

    def _stream(self, requests, ask):
        self.asked.append(requests["group_id"].to_pylist())
        made = self._siblings(requests, ask)
        chunk = ask.chunk or max(1, len(made))
        parts = [made.slice(start, chunk) for start in range(0, len(made), chunk)]
        return Stream(parts[:self.parts] if self.error else parts, self.error)

    def _siblings(self, requests, ask):
        made = []
        for row in requests.to_pylist():
            size = row["count"] + row["more"] * (row["group_id"] in self.extended)
            siblings = (self._one(f"{row['group_id']}/{j}", "t") for j in range(size))
            made.append(replace(group(*siblings, name=row["group_id"]), pilots=row["count"] if row["more"] else 0))
        return groups_to_table(made)


class Pool:
    """Leases the generators in turn and writes down what it is told."""

    def __init__(self, *generators):
        self.generators, self.log, self.preferred = list(generators), [], []
        self.sizes = []  # rollouts leased, and given back as negative numbers
        self.lease = remote(self._lease)
        self.release = remote(lambda member, rollouts: self.log.append(("release", member)) or self.sizes.append(-rollouts))
        self.report = remote(lambda *told: self.log.append(("report", *told)))

    def _lease(self, version, rollouts, avoid, patience, prefer):
        self.preferred.append(prefer)
        self.sizes.append(rollouts)
        self.log.append(("lease", version, avoid))
        number = sum(entry[0] == "lease" for entry in self.log) - 1
        return Lease(f"g{number}", self.generators[number])


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(collect, "ray", types.SimpleNamespace(
        get=lambda work, timeout: work(), wait=lambda streams, timeout: (streams, []), ObjectRefGenerator=Stream))


def collection(pool, retries=1):
    return Collection(pool=pool, version=3, retries=retries, deadline=time.time() + 60)


def trunks(pool, tasks="abc", count=1, retries=1):
    table = tasks_to_table([Task(task_id=task, seed=0) for task in tasks])
    made = sample("episodes", table, Ask(seed=0, temperature=1.0, count=count), collection(pool, retries))
    return [(one.rollout_id, one.end) for part in made for one in table_to_rollouts(part)]


def wanted(names, counts=(2, 2, 2), more=0):
    boundary = {"turn": 0, "context_hash": "c", "state_hash": "s", "snapshot": b""}
    rows = [{"group_id": name, "task_id": "t", "parent": "t/0", "count": count, "more": more, "boundary": boundary}
            for name, count in zip(names, counts[: len(names)], strict=True)]
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def parts(pool, names="abc", retries=1, counts=(2, 2, 2), chunk=0):
    """[part][group]: (its name, how its siblings ended)."""
    made = sample("siblings", wanted(names, counts), Ask(seed=0, temperature=1.0, chunk=chunk), collection(pool, retries))
    return [[(one.group_id, [sibling.end for sibling in one.siblings]) for one in table_to_groups(part)] for part in made]


def groups(pool, **options):
    return {name: ends for part in parts(pool, **options) for name, ends in part}


def test_a_good_answer_is_taken_as_it_is_and_the_lease_released():
    pool = Pool(Generator())
    assert trunks(pool) == [("a/0", "terminated"), ("b/0", "terminated"), ("c/0", "terminated")]
    assert pool.log == [("lease", 3, ()), ("release", "g0")]


def test_siblings_go_where_most_of_their_trunks_were_sampled():
    pool = Pool(Generator(), Generator())
    rows = wanted("abc")
    homes = pa.array(["g1", "g7", "g7"])
    rows = rows.set_column(rows.column_names.index("generator"), "generator", homes)
    assert len(list(sample("siblings", rows, Ask(seed=0, temperature=1.0), collection(pool)))) == 1
    trunks(pool, tasks="a")
    assert pool.preferred == ["g7", ""]


def test_failed_groups_alone_are_tried_again_elsewhere():
    first, second = Generator(broken={"b/1"}), Generator()
    pool = Pool(first, second)
    assert groups(pool) == {name: ["terminated"] * 2 for name in "abc"}
    assert (first.asked, second.asked) == ([["a", "b", "c"]], [["b"]])
    assert pool.log == [("lease", 3, ()), ("release", "g0"), ("lease", 3, ("g0",)), ("release", "g1")]
    assert pool.sizes == [6, -6, 2, -2]  # in rollouts


def test_a_group_that_keeps_failing_comes_back_failed():
    pool = Pool(*(Generator(broken={"b/1"}) for _ in range(3)))
    assert groups(pool, retries=2) == {"a": ["terminated"] * 2, "c": ["terminated"] * 2, "b": ["terminated", "failed"]}
    assert [generator.asked for generator in pool.generators] == [[["a", "b", "c"]], [["b"]], [["b"]]]


def test_without_retries_a_failure_is_final():
    assert trunks(Pool(Generator(broken={"b/0"})), retries=0) == [("a/0", "terminated"), ("b/0", "failed"), ("c/0", "terminated")]


def test_several_trunks_of_a_task_come_back_once_each_when_one_of_them_failed():
    pool = Pool(Generator(broken={"b/1"}), Generator())
    found = trunks(pool, count=3)
    assert pool.sizes == [9, -9, 3, -3]
    assert sorted(found) == [(f"{task}/{j}", "terminated") for task in "abc" for j in range(3)]


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError("overran")])
def test_a_generator_that_dies_or_overruns_is_reported_and_its_rows_sampled_elsewhere(error):
    second = Generator()
    pool = Pool(Generator(error=error), second)
    assert trunks(pool) == [("a/0", "terminated"), ("b/0", "terminated"), ("c/0", "terminated")]
    assert second.asked == [["a", "b", "c"]]
    kind, member, reason = pool.log[1]
    assert (kind, member) == ("report", "g0") and reason.startswith(f"{type(error).__name__}: ")
    assert pool.log[2:] == [("lease", 3, ("g0",)), ("release", "g1")]


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError("overran")])
def test_rows_that_no_generator_survives_come_back_failed_every_one_of_them(error):
    pool = Pool(*(Generator(error=error) for _ in range(3)))  # a third death is no chance any more
    assert trunks(pool, tasks="ab", count=2) == [("a/0", "failed"), ("a/1", "failed"), ("b/0", "failed"), ("b/1", "failed")]
    assert [entry[:2] for entry in pool.log if entry[0] == "report"] == [("report", "g0"), ("report", "g1"), ("report", "g2")]
    lost = groups(Pool(*(Generator(error=error) for _ in range(3))), names="ab", counts=(2, 3))
    assert lost == {"a": ["failed"] * 2, "b": ["failed"] * 3}


def test_a_pool_without_generators_costs_the_rows():
    class Empty(Pool):
        def _lease(self, *asked):
            raise NoGenerators("every generator is gone")

    assert trunks(Empty(), tasks="ab", retries=2) == [("a/0", "failed"), ("b/0", "failed")]


def test_after_the_deadline_no_other_generator_is_blamed():
    pool = Pool(Generator(error=GetTimeoutError("overran")), Generator())
    late = Collection(pool=pool, version=3, retries=1, deadline=time.time() - 1)
    made = sample("episodes", tasks_to_table([Task(task_id="a", seed=0)]), Ask(seed=0, temperature=1.0, count=1), late)
    assert [one.end for part in made for one in table_to_rollouts(part)] == ["failed"]
    assert [entry[1] for entry in pool.log if entry[0] == "report"] == ["g0"]


def test_no_rows_ask_nobody():
    pool = Pool()
    assert trunks(pool, tasks="") == [] and groups(pool, names="") == {}
    assert pool.log == []


def test_a_pool_that_does_not_answer_is_named(monkeypatch):
    def get(work, timeout):
        raise GetTimeoutError("late")

    monkeypatch.setattr(collect, "ray", types.SimpleNamespace(get=get, ObjectRefGenerator=Stream))
    with pytest.raises(DeadlineExceeded, match="the pool did not answer within .* at weight version 3"):
        trunks(Pool(Generator()))


# --- one block of trunks to one block of groups

RTPO = AlgorithmConfig(name="rtpo", args={"n_siblings": 3})
TURN = Stage(turn=1, n_siblings=3, baseline="boundary", with_trunk=False)


def stage(pool, trunks, stage=TURN, method=RTPO, chunk=0):
    made = collect._groups(rollouts_to_table(trunks), stage, algorithms.build(method), Ask(seed=0, temperature=1.0, chunk=chunk), collection(pool))
    return [{one.group_id: [sibling.rollout_id for sibling in one.siblings] for one in table_to_groups(part)} for part in made]


def test_a_block_of_trunks_becomes_the_groups_of_a_stage():
    pool = Pool(Generator())
    assert stage(pool, [trunk("t/0", 0.0, 1.0), trunk("t/1", 1.0)]) == [{"t/0/1": [f"t/0/1/{j}" for j in range(3)]}]
    assert pool.log == [("lease", 3, ()), ("release", "g0")]


def test_a_method_that_does_not_branch_asks_no_generator():
    pool = Pool()
    assert stage(pool, [trunk("t/0", 0.0), trunk("t/1", 1.0)], Stage(), AlgorithmConfig(name="grpo")) == [{"t": ["t/0", "t/1"]}]
    assert pool.log == []


def test_a_block_without_the_turn_asks_no_generator():
    pool = Pool()
    assert stage(pool, [trunk("t/0", 0.0)]) == [] and pool.log == []


def test_groups_go_on_as_they_come_unless_one_may_span_several_boundaries():
    trunks = [trunk(f"t/{number}", 0.0, 1.0) for number in range(3)]
    alone = [{f"t/{number}/1": [f"t/{number}/1/{j}" for j in range(3)]} for number in range(3)]
    assert stage(Pool(Generator()), trunks, chunk=1) == alone
    merged = stage(Pool(Generator()), trunks, replace(TURN, merge=True), chunk=1)
    assert [sorted(sum(part.values(), [])) for part in merged] == [sorted(name for part in alone for names in part.values() for name in names)]


def test_siblings_that_a_generator_lost_or_doubled_are_refused():
    class Careless(Generator):
        def _siblings(self, requests, ask):
            fewer = pa.array([count - 1 for count in requests["count"].to_pylist()], pa.int32())
            return super()._siblings(requests.set_column(requests.column_names.index("count"), "count", fewer), ask)

    class Doubling(Generator):
        def _siblings(self, requests, ask):
            return pa.concat_tables([super()._siblings(requests, ask)] * 2)

    class Forgetful(Generator):
        def _siblings(self, requests, ask):
            return super()._siblings(requests, ask).slice(1)

    trunks = [trunk("t/0", 0.0, 1.0), trunk("t/1", 0.0, 1.0)]
    with pytest.raises(ConservationError, match=r"group t/0/1: asked for 3 siblings and 0 more if its pilots say so; got 2"):
        stage(Pool(Careless()), trunks)
    with pytest.raises(ConservationError, match=r"group t/0/1: .* or the group came twice"):
        stage(Pool(Doubling()), trunks)
    with pytest.raises(ConservationError, match=r"asked for siblings of 2 groups; t/0/1 did not come"):
        stage(Pool(Forgetful()), trunks)


def test_pilots_are_followed_by_all_of_the_others_or_by_none():
    made = collect._siblings(wanted("abc", counts=(2, 2, 2), more=3), Ask(seed=0, temperature=1.0), collection(Pool(Generator(extended="b"))))
    assert [(one.group_id, len(one.siblings), one.pilots) for part in made for one in table_to_groups(part)] == [
        ("a", 2, 2), ("b", 5, 2), ("c", 2, 2)]

    class Stingy(Generator):
        def _siblings(self, requests, ask):
            made = table_to_groups(super()._siblings(requests, ask))
            return groups_to_table(replace(one, siblings=one.siblings[:4]) for one in made)

    with pytest.raises(ConservationError, match="group b: asked for 2 siblings and 3 more if its pilots say so; got 4"):
        list(collect._siblings(wanted("ab", more=3), Ask(seed=0, temperature=1.0), collection(Pool(Stingy(extended="b")))))


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError("overran")])
def test_what_a_generator_handed_on_before_it_died_is_kept_and_the_rest_sampled_elsewhere(error):
    second = Generator()
    pool = Pool(Generator(error=error, parts=2, broken={"b/1"}), second)
    assert parts(pool, chunk=1) == [[("a", ["terminated"] * 2)], [("b", ["terminated"] * 2)], [("c", ["terminated"] * 2)]]
    assert second.asked == [["b", "c"]]  # b had failed there
    assert [entry[:2] for entry in pool.log] == [("lease", 3), ("report", "g0"), ("lease", 3), ("release", "g1")]


def test_groups_come_in_chunks_and_those_that_failed_last():
    pool = Pool(Generator(broken={"b/1"}), Generator())
    assert [[name for name, _ in part] for part in parts(pool, names="abcde", counts=(2,) * 5, chunk=2)] == [["a"], ["c", "d"], ["e"], ["b"]]


def test_groups_are_credited_by_the_method_of_the_configuration():
    made = groups_to_table([group(trunk("t/0", 1.0), trunk("t/1", 0.0), trunk("t/2", 0.0), trunk("t/3", 1.0), name="t", turn=None)])
    trunks = [sibling for one in table_to_groups(made) for sibling in one.siblings]
    blocks = list(collect._samples(rollouts_to_table(trunks), stage=Stage(), method=AlgorithmConfig(name="rloo"), ask=Ask(seed=0, temperature=1.0),
                                   collection=collection(Pool())))
    assert [len(block) for block in blocks] == [1]  # so that nobody can tear it apart
    assert unpack(blocks[0])["advantage"].to_pylist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_episodes_and_the_samples_that_are_made_of_them_come_together_as_tasks_are_complete():
    table = tasks_to_table([Task(task_id=task, seed=0) for task in "abc"])
    pool = Pool(Generator(broken={"b/1"}), Generator())
    blocks = list(collect._episodes_and_samples(table, stage=Stage(), method=AlgorithmConfig(name="grpo"),
                                                ask=Ask(seed=0, temperature=1.0, count=2), collection=collection(pool)))
    assert [len(block) for block in blocks] == [1, 1]
    found = [(sorted(one.rollout_id for one in table_to_rollouts(unpack(block, "episodes"))), unpack(block)["group_id"].to_pylist())
             for block in blocks]
    assert found == [(["a/0", "a/1", "c/0", "c/1"], ["a", "a", "c", "c"]), (["b/0", "b/1"], ["b", "b"])]
    counts = [collect._count(block, None) for block in blocks]
    assert [(part.episodes, part.failed.total()) for part in counts] == [(4, 0), (2, 0)]


def test_an_empty_block_is_no_episodes():
    assert collect._count(pa.table({}), None).episodes == 0 and len(unpack(pa.table({}))) == len(unpack(pa.table({}), "episodes")) == 0


def dataset_of_nothing():
    """Already made, as trunks are; without Ray."""
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = None
    return MaterializedDataset(LogicalPlan(InputData(input_data=[]), context), context, DatasetStats(metadata={}, parent=None))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_stage_is_streamed_and_nothing_that_is_made_beside_it_is(monkeypatch, in_order):
    seen = []

    def look(samples):
        seen.append((samples.context.target_max_block_size, samples.context.execution_options.preserve_order))
        beside = dataset_of_nothing().context  # an evaluation's, in another thread
        seen.append((beside.target_max_block_size, beside.execution_options.preserve_order))
        return iter(())

    monkeypatch.setattr(ray.data.Dataset, "iter_internal_ref_bundles", look)
    monkeypatch.setattr(collect, "dataset", lambda tasks, blocks: dataset_of_nothing())
    where, ask = replace(collection(None), in_order=in_order), Ask(seed=0, temperature=1.0)
    assert not list(collect.stage_samples(dataset_of_nothing(), Stage(turn=0, n_siblings=2), AlgorithmConfig(), ask, where))
    assert not list(collect.stage_of_episodes([], Stage(), AlgorithmConfig(), ask, where, 1))
    assert seen == 2 * [(1, in_order), (None, False)]


def test_trunks_lie_in_the_order_of_their_tasks(monkeypatch):
    monkeypatch.setattr(ray.data.Dataset, "materialize", lambda made: made.context.execution_options.preserve_order)
    monkeypatch.setattr(collect, "dataset", lambda tasks, blocks: dataset_of_nothing())
    assert collect.collect_episodes([], "trunks", Ask(seed=0, temperature=1.0), collection(None), 1)
