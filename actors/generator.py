"""The generator: one sampling engine that plays whole episodes, many at once.

Episodes, environment steps and the engine share one event loop in a thread of their own, so a rollout whose turn ends
joins the engine's next batch at once, while the actor itself keeps answering. The longest rollouts are begun first, and one
that has begun goes on before others are. Between stages it takes new weights from the weight channel.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from actors.slots import Occupancy, Rank, Seat, Slots
from actors.waiting import on_node
from pipelines.collect import Ask
from pipelines.rows import groups_to_table, rollouts_to_table, table_to_tasks
from rtpo_ray.algorithms.budget import chance_of_more, is_extended
from rtpo_ray.engines.base import Engine
from rtpo_ray.environments.base import Environment
from rtpo_ray.episodes.contexts import ChatTemplate
from rtpo_ray.episodes.episode import Episode, EpisodeSettings
from rtpo_ray.errors import RtpoError
from rtpo_ray.timeline import Span, Timeline
from rtpo_ray.types import Boundary, Completion, Group, PushTimes, Rollout, Sampling, Task, derive_seed, failed_rollout

if TYPE_CHECKING:
    from rtpo_ray.weights.channel import WeightChannel

SPARE = 3.0  # times what a group is expected to take: what its trunk took is a guess, and of several siblings one takes longest


class Generator:
    """Args:
    name: for the dashboard and error messages.
    make_engine: builds the engine, in the thread that will use it.
    make_environment: builds a fresh environment an episode.
    template: the model's chat template.
    concurrency: episodes in flight at once: each has an environment.
    slots: responses that the engine samples at once; 0: as many as episodes.
    conceal: takes secrets out of the message of an error.
    """

    def __init__(self, *, name: str, make_engine: Callable[[], Engine], make_environment: Callable[[], Environment], template: ChatTemplate,
                 settings: EpisodeSettings, overlong: str, concurrency: int,
                 slots: int = 0, conceal: Callable[[str], str] = str) -> None:
        self._name, self._make_environment, self._template = name, make_environment, template
        self._settings, self._overlong, self._conceal = settings, overlong, conceal
        self._timeline = Timeline(name)
        self._n_slots = slots or concurrency
        self._environments, self._slots = Slots(concurrency), Slots(self._n_slots)
        self._occupancy = Occupancy(self._n_slots, self._timeline)
        self._channel: WeightChannel | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(concurrency, "environment"))  # a step that waits for a thread would overrun its deadline
        threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()
        warm = make_environment()  # what all environments of a process share is made here, where nobody's deadline runs
        self._instant = warm.instant
        warm.close()
        self._engine = asyncio.run_coroutine_threadsafe(_call(make_engine), self._loop).result()

    def __repr__(self) -> str:
        return f"Generator({getattr(self, '_name', 'starting')}{on_node()})"  # Ray asks also when __init__ failed

    async def ready(self) -> str:
        """Answers once the engine is up: the id of the node that it runs on."""
        return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""

    async def alive(self) -> float:
        """Answers when the episode loop does: the seconds that it took to. Raises EngineError when the engine has failed for good: it would
        fail all that it is given."""
        asked = time.perf_counter()
        await self._run(_call(self._engine.check))
        return time.perf_counter() - asked

    async def episodes(self, tasks: pa.Table, ask: Ask) -> AsyncIterator[pa.Table]:
        """TASKS rows to ROLLOUTS rows, `ask.count` episodes a task. Yields as `siblings` does, the episodes of `ask.chunk` tasks at a time."""
        async def play(task: Task, place: int) -> list[Rollout]:
            return await asyncio.gather(*(self._trunk(task, trunk, ask, (0.0, float(place))) for trunk in range(ask.count)))

        work = [functools.partial(play, task, place) for place, task in enumerate(table_to_tasks(tasks))]
        async for made in self._in_chunks(work, ask.chunk):
            yield rollouts_to_table(rollout for rollouts in made for rollout in rollouts)

    async def siblings(self, requests: pa.Table, ask: Ask) -> AsyncIterator[pa.Table]:
        """REQUESTS rows to GROUPS rows: the siblings of each boundary, continued to the end by the same weights.

        Yields `ask.chunk` consecutive groups at a time, in the order of the requests, as soon as all of them are complete: order and borders are
        the same in every run. Whoever stops taking them ends the rollouts that are left.
        """
        rows, size = requests.to_pylist(), ask.chunk or max(1, len(requests))
        work = [functools.partial(self._group, row, rank, ask) for row, rank in zip(rows, _ranks(rows, self._n_slots, size), strict=True)]
        async for made in self._in_chunks(work, size):
            yield groups_to_table(made)

    async def _in_chunks(self, work: Sequence[Callable[[], Coroutine[Any, Any, Any]]], size: int) -> AsyncIterator[list[Any]]:
        """Do all of it at once, on the episode loop; results in order, `size` at a time; 0: all together."""
        async def begin() -> list[asyncio.Task[Any]]:
            return [asyncio.create_task(each()) for each in work]

        begun, size = await self._run(begin()), size or max(1, len(work))
        try:
            for start in range(0, len(begun), size):
                yield await self._run(_all_of(begun[start:start + size]))
        finally:
            for each in begun:
                self._loop.call_soon_threadsafe(each.cancel)  # nothing, when it is done

    async def take_spans(self) -> list[Span]:
        """What happened here since the last call, for the run's timeline."""
        return self._timeline.take()

    async def take_occupancy(self) -> dict[str, float]:
        """How full the engine was since the last call, as of an Occupancy."""
        return await self._run(_call(self._occupancy.take))

    async def join_channel(self, name: str, rank: int, world_size: int, host: str, port: int, device: str, timeout: float, bucket_bytes: int) -> None:
        """Become receiver `rank` of the weight channel `name`; returns when every rank is there."""
        from rtpo_ray.weights.channel import WeightChannel  # imports torch, which a process that only holds a handle does not need

        def join() -> None:
            if self._channel is not None:
                self._channel.close()
            self._channel = WeightChannel(name, rank, world_size, host, port, device, timeout, bucket_bytes, self._timeline)
        await self._run(_call(join))

    async def receive_weights(self) -> tuple[int, str, PushTimes]:
        """Take the weights that are being sent: (version now served, hash of what arrived, what it took)."""
        return await self._run(_call(self._receive))

    async def probe(self, context_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Completion:
        """A short sample whose log-probabilities the learner scores again."""
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens, stop_token_ids=(), seed=seed)
        return await self._run(self._engine.generate(context_ids, sampling))

    async def first_context(self, task: Task) -> list[int]:
        """Of `task`, as far as the engine can hold it: what probes start from."""
        async def begin() -> list[int]:
            episode = await self._episode()
            try:
                await episode.off_loop("reset", episode.reset, task)
                return episode.context()[-(self._settings.max_model_len // 2):]
            finally:
                await episode.close()

        try:
            return list(await self._run(begin()))
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything, and the cause could say a secret
            raise RtpoError(self._conceal(f"the first context of task {task.task_id}: {type(error).__name__}: {error}")) from None

    def _receive(self) -> tuple[int, str, PushTimes]:
        assert self._channel is not None, f"{self._name} was asked to receive weights before it joined a channel"
        with self._timeline.span("receive weights"):
            incoming = self._channel.receive()
            self._engine.load_weights(incoming.tensors(), incoming.version)
        return self._engine.weight_version, incoming.hash, incoming.times

    async def _trunk(self, task: Task, trunk: int, ask: Ask, rank: Rank) -> Rollout:
        name = "trunk" if ask.keep_boundaries else "evaluation"
        return await self._rollout(name, f"{task.task_id}/{trunk}", task.task_id, ask, lambda episode: episode.reset(task), rank)

    async def _group(self, row: dict[str, Any], rank: Rank, ask: Ask) -> Group:
        """The group of one REQUESTS row: its siblings, or pilots and, when these ask for them, others."""
        boundary = Boundary(**row["boundary"])

        async def sample(indices: range) -> list[Rollout]:
            return await asyncio.gather(*(
                self._rollout("sibling", f"{row['group_id']}/{index}", row["task_id"], ask, lambda episode: episode.restore(boundary), rank)
                for index in indices))

        siblings, pilots, chance = await sample(range(row["count"])), 0, 1.0
        if row["more"]:
            pilots, returns = row["count"], [pilot.returns_to_go for pilot in siblings]
            chance = chance_of_more(returns, row["explore"])
            lost = any(pilot.end in ("failed", "capped") for pilot in siblings)  # so is the group
            if not lost and is_extended(returns, row["explore"], derive_seed(ask.seed, row["group_id"], "more")):
                siblings += await sample(range(pilots, pilots + row["more"]))
        return Group(group_id=row["group_id"], task_id=row["task_id"], turn=boundary.turn, pilots=pilots, chance=chance,
                     siblings=tuple(replace(sibling, parent=row["parent"]) for sibling in siblings))

    async def _rollout(self, name: str, rollout_id: str, task_id: str, ask: Ask, begin: Callable[[Episode], None], rank: Rank) -> Rollout:
        """One episode, when its turn has come and unless it has come too late."""
        self._occupancy.open(+1)
        try:
            async with self._environments.held(rank):
                if ask.cutoff and time.time() >= ask.cutoff:
                    return Rollout(rollout_id=rollout_id, task_id=task_id, turns=(), end="capped", generator=self._name)
                started = time.time()
                rollout = await self._guard(rollout_id, task_id, ask, begin, rank)
                self._timeline.add(name, started, time.time(), "rollouts", flight=True, rollout=rollout_id, turns=len(rollout.turns),
                                   tokens=sum(len(turn.response_ids) for turn in rollout.turns), ended=rollout.end)
                return replace(rollout, generator=self._name)
        finally:
            self._occupancy.open(-1)

    async def _guard(self, rollout_id: str, task_id: str, ask: Ask, begin: Callable[[Episode], None], rank: Rank) -> Rollout:
        """Whatever environment, template or engine raise costs this rollout alone and is kept as its failure."""
        episode = None
        try:
            episode = await self._episode()
            await episode.off_loop("reset or restore", begin, episode)
            rollout = await episode.run(Seat(self._engine, self._slots, self._occupancy, rank), rollout_id=rollout_id, task_id=task_id,
                                        seed=derive_seed(ask.seed, rollout_id), temperature=ask.temperature,
                                        keep_boundaries=ask.keep_boundaries, cutoff=ask.cutoff)
            if rollout.end == "overlong" and not rollout.turns and self._overlong == "error":
                raise ValueError(f"the first context leaves no room for a response in generators.max_model_len ({self._settings.max_model_len}); "
                                 "raise it, or set sampling.overlong=drop to count and skip such tasks")
        except asyncio.CancelledError:
            if episode is not None:
                await episode.close()
            raise
        except Exception as error:  # noqa: BLE001 - anything may come out of a user's environment
            rollout = failed_rollout(rollout_id, task_id, self._conceal(f"{type(error).__name__}: {error}"))
        try:
            if episode is not None:
                await episode.close()
        except Exception as error:  # noqa: BLE001 - as above; what the episode itself died of comes first
            return rollout if rollout.failure else failed_rollout(rollout_id, task_id, self._conceal(f"{type(error).__name__}: {error}"))
        return rollout

    async def _episode(self) -> Episode:
        """A fresh one, its environment made in a thread unless that is instant."""
        make = functools.partial(Episode, self._make_environment, self._template, self._settings, self._timeline)
        if self._instant:
            return make()
        async with asyncio.timeout(self._settings.step_timeout):
            return await asyncio.to_thread(make)

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do `work` on the episode loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def _ranks(rows: list[dict[str, Any]], slots: int, size: int) -> list[Rank]:
    """In which order the groups of these REQUESTS rows are begun; siblings of one stay near each other, since they share its context.

    The longest first ends a stage earliest, but where groups are handed on in chunks of `size`, all chunks would be complete only at its end.
    Those are begun in the order of the requests, unless one would then be left with less than `SPARE` times what it is expected to take.
    """
    expected = [float(row["expected_tokens"] or 0) for row in rows]
    if size >= len(rows):
        return [(-tokens, float(place)) for place, tokens in enumerate(expected)]
    begins = list(itertools.accumulate((tokens * row["count"] / slots for tokens, row in zip(expected, rows, strict=True)), initial=0.0))
    return [(min(begin, begins[-1] - SPARE * tokens), float(place)) for place, (begin, tokens) in enumerate(zip(begins, expected, strict=False))]


async def _all_of(work: Sequence[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*work)


async def _call(function: Callable[[], Any]) -> Any:
    return function()
