"""Ray Data executions: tasks to trunks, trunks to credited samples, tasks to evaluated episodes.

    trunks  = collect_episodes(...)               materialised: blocks stay where they were made, in the object store
    samples = stage_samples(trunks, stage, ...)   lazy: boundaries -> siblings -> groups -> credit -> samples, streamed block by block

The step that samples is a plain function in a task without CPUs: it leases a generator from the pool, hands over the block, and
returns what the generator made. The pool and the generators are handles; nothing here knows their classes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from pyarrow import feather
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from pipelines.branching import assemble, requests
from pipelines.counts import EpisodeCounts, count_episodes
from pipelines.credit import credit_groups
from pipelines.rows import GROUPS, ROLLOUTS, groups_to_table, pack, rollouts_to_table, unpack
from pipelines.tasks import dataset
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Algorithm, Stage
from rtpo_ray.config import AlgorithmConfig
from rtpo_ray.errors import ConservationError, CoordinatorLost, DeadlineExceeded, NoGenerators
from rtpo_ray.types import Group, Task, failed_rollout

Block: TypeAlias = "ray.ObjectRef[pa.Table]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What every sampling step of a run needs."""

    pool: Any  # actor handle: lease(version, rollouts, ...), release(member, rollouts), report(member, error)
    version: int  # weight version that must have sampled
    retries: int
    deadline: float  # time.time() after which the step gives up
    concurrency: int = 4  # blocks that wait for a generator or are sampled at once; each is a process
    in_order: bool = True  # whether a block waits for those before it, so that the learner adds up the same sums in every run
    patience: float = 150.0  # seconds for the pool to answer what it can answer at once
    home: str = ""  # id of the node on which all of this runs and what it makes stays; empty: any

    def task(self) -> dict[str, Any]:
        """How Ray Data runs a step: without a CPU, since it mostly waits."""
        return {"batch_format": "pyarrow", "batch_size": None, "zero_copy_batch": True, "num_cpus": 0, **_stay(self.home)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call of a generator: sample every row of a block."""

    seed: int
    temperature: float
    count: int = 1  # episodes a task; a boundary's request names its own number of siblings
    keep_boundaries: bool = False
    chunk: int = 0  # groups that are handed on together, as soon as all of them are complete; 0: all of them at the end
    cutoff: float = 0.0  # time.time() at which rollouts that are still under way are cut; 0: never


def collect_episodes(tasks: Sequence[Task], name: str, ask: Ask, collection: Collection, blocks: int) -> ray.data.MaterializedDataset:
    """Whole episodes of every task (ROLLOUTS rows), left in the object store."""
    at_once = min(collection.concurrency, blocks, max(1, len(tasks)))  # Ray Data warns of more than there are blocks
    rollouts = dataset(tasks, blocks).map_batches(_sample_tasks, fn_kwargs={"ask": ask, "collection": collection}, concurrency=at_once,
                                                  **collection.task())
    rollouts.set_name(name)
    rollouts.context.execution_options.preserve_order = True  # of blocks: stages that take them in order would differ from run to run
    return rollouts.materialize()


def stage_samples(trunks: ray.data.MaterializedDataset, stage: Stage, method: AlgorithmConfig, ask: Ask, collection: Collection) -> Iterator[Block]:
    """Packed SAMPLES rows of one stage, block by block, each as soon as its groups are complete. `method` is built again where it is needed."""
    options = {"concurrency": max(1, min(collection.concurrency, trunks.num_blocks())), **collection.task()}
    grow = {"stage": stage, "method": method, "ask": ask, "collection": collection}
    yield from _streamed(trunks.map_batches(_samples, fn_kwargs=grow, **options), collection.in_order)


def stage_of_episodes(
    tasks: Sequence[Task], stage: Stage, method: AlgorithmConfig, ask: Ask, collection: Collection, blocks: int
) -> Iterator[Block]:
    """The same where a stage is made of whole episodes alone: these are sampled on the way, and are in the blocks too."""
    options = {"concurrency": min(collection.concurrency, blocks, max(1, len(tasks))), **collection.task()}
    play = {"stage": stage, "method": method, "ask": ask, "collection": collection}
    yield from _streamed(dataset(tasks, blocks).map_batches(_episodes_and_samples, fn_kwargs=play, **options), collection.in_order)


def _streamed(samples: ray.data.Dataset, in_order: bool) -> Iterator[Block]:
    """The blocks of a stage: every row that a step yields is handed on at once, instead of all of a step's at its end; `in_order`: of the steps.

    Both are said to this dataset alone. The process's own context is that of evaluations too, whose episodes of a task must stay in one block, and
    a dataset no longer looks at it once it is made, as trunks are.
    """
    samples.set_name("stage")
    samples.context.target_max_block_size, samples.context.execution_options.preserve_order = 1, in_order
    return itertools.chain.from_iterable(bundle.block_refs for bundle in samples.iter_internal_ref_bundles())


class EpisodeCounter:
    """Counts blocks of episodes, or of packed ones, where they are, from the moment on that each is given.

    keep: a folder in which the episodes are kept as well; home: as of a Collection.
    """

    def __init__(self, keep: Path | None = None, home: str = "") -> None:
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            keep.mkdir(parents=True)
        self._keep, self._count = keep, ray.remote(num_cpus=0, **_stay(home))(_count)
        self._parts: list[ray.ObjectRef] = []

    def through(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """The blocks, counted as they come."""
        for block in blocks:
            self._parts.append(self._count.remote(block, self._keep and self._keep / f"{len(self._parts):05d}.arrow"))
            yield block

    def total(self, timeout: float) -> EpisodeCounts:
        """Of all that came. `timeout`: seconds."""
        return sum(ray.get(self._parts, timeout=timeout), EpisodeCounts())


def count_rollouts(rollouts: Iterable[Block], timeout: float, keep: Path | None = None, home: str = "") -> EpisodeCounts:
    """Counts of blocks that are there, as of an EpisodeCounter."""
    counter = EpisodeCounter(keep, home)
    for _ in counter.through(rollouts):
        pass
    return counter.total(timeout)


def read_episodes(folder: Path, home: str = "") -> ray.data.MaterializedDataset:
    """What `count_rollouts` kept in `folder`: the episodes, in the object store again, of the node `home`."""
    read = ray.remote(num_cpus=0, **_stay(home))(_read)
    return ray.data.from_arrow_refs([read.remote(file) for file in sorted(folder.glob("*.arrow"))])


def _stay(home: str) -> dict[str, Any]:
    return {"label_selector": {"ray.io/node-id": home}} if home else {}


def _count(block: pa.Table, keep: Path | None) -> EpisodeCounts:
    rollouts = unpack(block, "episodes") if "episodes" in block.column_names or not len(block) else block
    if keep is not None:
        with keep.open("wb") as file:
            feather.write_feather(rollouts, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())  # the ledger says that it is there
    return count_episodes(rollouts)


def _read(file: Path) -> pa.Table:
    return feather.read_table(file)


def _sample_tasks(tasks: pa.Table, *, ask: Ask, collection: Collection) -> pa.Table:
    parts = list(sample("episodes", tasks, ask, collection))
    return pa.concat_tables(parts) if parts else ROLLOUTS.empty_table()


def _episodes_and_samples(tasks: pa.Table, *, stage: Stage, method: AlgorithmConfig, ask: Ask, collection: Collection) -> Iterator[pa.Table]:
    """Tasks to episodes and packed samples of these, as all episodes of some tasks are complete."""
    algorithm = algorithms.build(method)
    for episodes in sample("episodes", tasks, ask, collection):
        yield pack(credit_groups(assemble(episodes, GROUPS.empty_table(), stage), algorithm=algorithm), episodes)


def _samples(trunks: pa.Table, *, stage: Stage, method: AlgorithmConfig, ask: Ask, collection: Collection) -> Iterator[pa.Table]:
    """Trunks to packed samples, as groups are complete."""
    algorithm = algorithms.build(method)
    for groups in _groups(trunks, stage, algorithm, ask, collection):
        yield pack(credit_groups(groups, algorithm=algorithm))


def _groups(trunks: pa.Table, stage: Stage, algorithm: Algorithm, ask: Ask, collection: Collection) -> Iterator[pa.Table]:
    """Trunks to groups (GROUPS rows): in parts as they are complete, or in one where a group may span several boundaries."""
    made = _siblings(requests(trunks, stage, algorithm, ask.seed), ask, collection)
    if stage.baseline != "boundary" or stage.merge:
        made = iter([pa.concat_tables([GROUPS.empty_table(), *made])])
    for groups in made:
        yield assemble(trunks, groups, stage)


def _siblings(wanted: pa.Table, ask: Ask, collection: Collection) -> Iterator[pa.Table]:
    """The siblings of these requests (GROUPS rows), in parts. Raises ConservationError when some are missing or there twice."""
    found: list[tuple[str, int, bool]] = []
    for part in sample("siblings", wanted, ask, collection):
        found += _sizes(part)
        yield part
    expected = {row["group_id"]: row for row in wanted.select(["group_id", "count", "more"]).to_pylist()}
    for name, size, extended in found:
        row = expected.pop(name, {"count": 0, "more": 0})
        if size != row["count"] + row["more"] * extended:
            raise ConservationError(f"group {name}: asked for {row['count']} siblings and {row['more']} more if its pilots say so; got {size}, or "
                                    "the group came twice")
    if expected:
        raise ConservationError(f"asked for siblings of {len(wanted)} groups; {', '.join(sorted(expected))} did not come")


def _sizes(groups: pa.Table) -> list[tuple[str, int, bool]]:
    """(group, siblings, whether more than pilots were sampled) of GROUPS rows."""
    sizes = pc.list_value_length(groups["siblings"]).to_pylist()
    pilots = groups["pilots"].to_pylist()
    return [(name, size, 0 < few < size) for name, size, few in zip(groups["group_id"].to_pylist(), sizes, pilots, strict=True)]


MOST_DEATHS = 3  # generators that may die of one block: more than chance, and it is the block that kills them


def sample(method: str, rows: pa.Table, ask: Ask, collection: Collection) -> Iterator[pa.Table]:
    """Have `method` of a leased generator sample the rows; those that fail are tried again on another generator, then come back as failed.

    A generator that dies or overruns the deadline is reported to the pool, which takes it out of service; what it had handed on stays. When the
    pool has none left, the rows come back as failed.
    """
    key = "task_id" if method == "episodes" else "group_id"
    avoid: tuple[str, ...] = ()
    attempt = deaths = 0
    while len(rows):
        size = len(rows) * ask.count if method == "episodes" else pc.sum(pc.add(rows["count"], rows["more"])).as_py()
        try:
            lease = _lease(collection, size, avoid, _home_of(rows))
        except NoGenerators as error:  # the next stage starts new ones
            yield _lost(method, rows, ask, f"NoGenerators: {_first_line(getattr(error, 'cause', error))}")
            return
        left, again = set(rows[key].to_pylist()), set[str]()
        try:
            for table in _parts(getattr(lease.generator, method).remote(rows, ask), collection.deadline):
                bad = _failed(table, key) if attempt < collection.retries else set[str]()
                left, again = left - set(table[key].to_pylist()), again | bad
                if bad:  # all trunks of a task are made again
                    table = table.filter(pa.array([value not in bad for value in table[key].to_pylist()]))
                if len(table):
                    yield table
        except (RayActorError, GetTimeoutError, ObjectLostError) as error:  # lost: what a generator made was still on its node
            reported = collection.pool.report.remote(lease.member, f"{type(error).__name__}: {_first_line(error)}")
            _answer(reported, collection.patience, "to take a generator out of service")
            deaths += 1
            rows, avoid = _only(rows, key, left | again), (*avoid, lease.member)
            if deaths == MOST_DEATHS or time.time() >= collection.deadline:
                yield _lost(method, rows, ask, f"{type(error).__name__}: no generator survived it in {deaths} tries, last {lease.member}")
                return
            continue
        _answer(collection.pool.release.remote(lease.member, size), collection.patience, "to take a generator back")
        attempt += 1
        rows, avoid = _only(rows, key, again), (*avoid, lease.member)


def _parts(answer: Any, deadline: float) -> Iterator[pa.Table]:
    """What a generator hands on, as it comes. Raises what the generator raised or died of, and GetTimeoutError."""
    if not isinstance(answer, ray.ObjectRefGenerator):
        yield ray.get(answer, timeout=max(0.0, deadline - time.time()))
        return
    while True:
        if not ray.wait([answer], timeout=max(0.0, deadline - time.time()))[0]:
            raise GetTimeoutError("the next siblings did not come before the deadline")
        part = next(answer, None)
        if part is None:
            return
        yield ray.get(part, timeout=max(1.0, deadline - time.time()))


def _only(rows: pa.Table, key: str, names: set[str]) -> pa.Table:
    return rows.filter(pa.array([value in names for value in rows[key].to_pylist()], pa.bool_()))


def _first_line(error: BaseException) -> str:
    """What a remote error says before its traceback or the state of its actor."""
    return str(error).strip().partition("\n")[0]


def _home_of(rows: pa.Table) -> str:
    """Who sampled most of the trunks that these start from: its cache may hold their contexts."""
    generators = Counter(rows["generator"].to_pylist()) if "generator" in rows.column_names else Counter[str]()
    return generators.most_common(1)[0][0] or "" if generators else ""


def _lease(collection: Collection, size: int, avoid: tuple[str, ...], prefer: str) -> Any:
    patience = collection.deadline - time.time()
    asked = collection.pool.lease.remote(collection.version, size, avoid, patience, prefer)
    return _answer(asked, max(1.0, patience) + collection.patience, f"for a generator at weight version {collection.version}")


def _answer(asked: Any, seconds: float, what: str) -> Any:
    """Of the pool. Its death, which a step may see before anyone else, is its coordinator's loss and no failure of the step."""
    try:
        return ray.get(asked, timeout=seconds)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"the pool did not answer within {seconds:.0f} s when asked {what}") from error
    except RayActorError as error:
        raise CoordinatorLost(f"the generator pool died when it was asked {what}: {_first_line(error)}") from error


def _lost(method: str, rows: pa.Table, ask: Ask, failure: str) -> pa.Table:
    """What `method` would have returned had every rollout of `rows` failed."""
    if method == "episodes":
        return rollouts_to_table(failed_rollout(f"{task_id}/{trunk}", task_id, failure)
                                 for task_id in rows["task_id"].to_pylist() for trunk in range(ask.count))
    return groups_to_table(
        Group(group_id=row["group_id"], task_id=row["task_id"], turn=row["boundary"]["turn"],
              siblings=tuple(failed_rollout(f"{row['group_id']}/{index}", row["task_id"], failure) for index in range(row["count"])))
        for row in rows.to_pylist())


def _failed(table: pa.Table, key: str) -> set[str]:
    """The requests of which a rollout failed."""
    return {name for name, is_bad in zip(table[key].to_pylist(), _failed_rows(table), strict=True) if is_bad}


def _failed_rows(table: pa.Table) -> list[bool]:
    if "siblings" not in table.column_names:
        return [end == "failed" for end in table["end"].to_pylist()]
    ends = pc.struct_field(pc.list_flatten(table["siblings"]), "end").to_pylist()  # the tokens stay in Arrow
    sizes = pc.list_value_length(table["siblings"]).to_pylist()
    return ["failed" in ends[stop - size:stop] for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]
