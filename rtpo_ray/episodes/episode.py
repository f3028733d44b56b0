"""One episode: the turn loop, and the boundaries from which siblings start again."""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtpo_ray import environments
from rtpo_ray.engines.base import Sampler
from rtpo_ray.environments.base import Environment, Observation, Step, ToolEnvironment
from rtpo_ray.episodes.contexts import Append, ChatTemplate, build_context
from rtpo_ray.errors import ContextMismatch
from rtpo_ray.timeline import Timeline
from rtpo_ray.types import Boundary, Completion, Rollout, Sampling, Task, TurnRecord, context_hash, derive_seed

if TYPE_CHECKING:
    from rtpo_ray.config import Config


NOTED = 1e-3  # seconds from which on a step of the environment is worth a span


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What is the same for every episode of a run."""

    max_turns: int
    context: str  # key of contexts.BUILDERS
    max_response_tokens: int
    max_model_len: int
    step_timeout: float  # seconds
    window: int = 1  # turns that context="window" keeps
    thoughts: str = "template"  # of earlier responses: "template": what the template makes of them; "strip": dropped before
    train_context: str = "recorded"  # where actions are scored: "recorded": in c_k; "concatenated": in the raw turns as Append lays them out


def episode_settings(config: Config) -> EpisodeSettings:
    """As the configuration says."""
    return EpisodeSettings(
        max_turns=config.environment.max_turns, context=config.environment.context, window=config.environment.window,
        thoughts=config.environment.thoughts, train_context=config.environment.train_context, max_response_tokens=config.sampling.max_response_tokens,
        max_model_len=config.generators.max_model_len, step_timeout=config.environment.step_timeout)


def environment_maker(config: Config, template: ChatTemplate) -> Callable[[], Environment]:
    """Makes environments whose model is spoken to in `template`."""
    def make() -> Environment:
        environment = environments.build(config.environment)
        if isinstance(environment, ToolEnvironment):
            environment.calls = template.calls.name
        return environment

    return make


class Episode:
    """State of one episode: environment + context builders + turn. `boundary` and `restore` cover all of it.

    An environment with `replay = True` is rebuilt from its seed and the responses so far; state hashes are compared either way.
    `timeline` gets what the environment takes longer over.
    """

    def __init__(self, make_environment: Callable[[], Environment], template: ChatTemplate, settings: EpisodeSettings,
                 timeline: Timeline | None = None) -> None:
        self._environment = make_environment()
        self._builder = build_context(settings.context, template, settings.window, settings.thoughts)
        self._builders = (self._builder, Append(template)) if settings.train_context == "concatenated" else (self._builder,)  # the last: for training
        self._template = template
        self._settings = settings
        self._timeline = timeline
        self._seed = 0
        self._row: dict[str, Any] = {}
        self._texts: list[str] = []  # responses so far, for replay
        self.turn = 0
        self.first = Observation("")

    def reset(self, task: Task) -> None:
        """Start a task from its first observation."""
        self._seed, self._row, self._texts, self.turn = task.seed, task.payload, [], 0
        self._environment.row = self._row
        self.first = self._environment.reset(task.seed)
        if not isinstance(self.first, Observation):
            raise TypeError(f"{type(self._environment).__name__}.reset returned {self.first!r}; expected an Observation")
        for builder in self._builders:
            builder.start(self._environment.system, self._environment.tools(), self.first)

    @property
    def environment(self) -> Environment:
        """Whose episode it is."""
        return self._environment

    def context(self) -> list[int]:
        """c_k, the token ids that the model sees next."""
        return self._builder.context()

    def boundary(self) -> Boundary:
        """S_k, to be restored anywhere in the cluster."""
        environment = (self._seed, self._texts) if self._environment.replay else self._environment.snapshot()
        contexts = [builder.snapshot() for builder in self._builders]
        blob = pickle.dumps((self.turn, self._seed, self._row, self._texts, environment, contexts))
        return Boundary(turn=self.turn, context_hash=context_hash(self._builder.context()),
                        state_hash=self._environment.state_hash(), snapshot=blob)

    def restore(self, boundary: Boundary) -> None:
        """Become the episode of `boundary`. Raises ContextMismatch when state or context differ from the recorded ones."""
        self.turn, self._seed, self._row, texts, environment, contexts = pickle.loads(boundary.snapshot)
        self._texts = list(texts)
        self._environment.row = self._row
        if self._environment.replay:
            self._environment.reset(self._seed)
            for text in self._texts:
                self._environment.step(text)
        else:
            self._environment.restore(environment)
        for builder, snapshot in zip(self._builders, contexts, strict=True):
            builder.restore(snapshot)
        state, context = self._environment.state_hash(), context_hash(self._builder.context())
        if state != boundary.state_hash:
            raise ContextMismatch(f"turn {self.turn}: restored environment has state hash {state}, the trunk had {boundary.state_hash}; "
                                  "the environment is not deterministic under its seed, or its snapshot is not complete")
        if context != boundary.context_hash:
            raise ContextMismatch(f"turn {self.turn}: restored context has hash {context}, the trunk had {boundary.context_hash}")

    async def close(self) -> None:
        """Let the environment go."""
        await self.off_loop("close", self._environment.close)

    async def run(self, engine: Sampler, *, rollout_id: str, task_id: str, seed: int, temperature: float, keep_boundaries: bool = False,
                  cutoff: float = 0.0) -> Rollout:
        """Play to the end. Turn k samples with a seed derived from `seed` and k. Raises what engine or environment raise.

        At `cutoff` (time.time(); 0: never) it ends with the turns that it has: a response under way is given up, a step is not.
        """
        turns: list[TurnRecord] = []
        boundaries: list[Boundary] = []
        end = "truncated"
        while self.turn < self._settings.max_turns:
            contexts = [builder.context() for builder in self._builders]
            sampling = self._sampling(max(contexts, key=len), temperature, derive_seed(seed, self.turn))
            if sampling is None:
                end = "overlong"
                break
            if keep_boundaries:
                boundaries.append(await self.off_loop("snapshot", self.boundary))
            completion = await _before(cutoff, engine, contexts[0], sampling)
            if completion is None:
                end = "capped"
                del boundaries[-1:]  # of a turn that did not come about
                break
            text = self._template.response_text(completion.token_ids, contexts[0])
            state_hash, step = await self._step(text)
            trained = () if contexts[-1] == contexts[0] else tuple(contexts[-1])
            turns.append(_record(self.turn, contexts[0], completion, sampling, step, state_hash, train_context_ids=trained))
            self.turn += 1
            if step.observation is None:
                end = "terminated" if step.terminated else "truncated"
                break
            self._texts.append(text)
            for builder in self._builders:
                builder.extend(completion.token_ids, step.observation)
            request = self._builder.summary_request() if self.turn < self._settings.max_turns else None
            if request is not None:
                sampling = self._sampling(request, temperature, derive_seed(seed, self.turn - 1, "summary"))
                if sampling is None:
                    end = "overlong"
                    break
                completion = await _before(cutoff, engine, request, sampling)
                if completion is None:
                    end = "capped"
                    break
                self._builder.summarise(completion.token_ids)
                turns.append(_record(self.turn - 1, request, completion, sampling, Step(), state_hash, kind="summary"))
        return Rollout(rollout_id=rollout_id, task_id=task_id, turns=tuple(turns), boundaries=tuple(boundaries), end=end)

    def _sampling(self, context: Sequence[int], temperature: float, seed: int) -> Sampling | None:
        """How to sample the response to `context`, the longest one that it must fit; None when there is no room for a token."""
        room = self._settings.max_model_len - len(context)
        if room < 1:
            return None
        return Sampling(temperature=temperature, max_tokens=min(room, self._settings.max_response_tokens),
                        stop_token_ids=self._template.stop_ids, seed=seed)

    async def _step(self, text: str) -> tuple[str, Step]:
        """One environment step, checked: (hash of the state before it, what came of it)."""
        name = type(self._environment).__name__
        state_hash, step = await self.off_loop(f"{name}.step", lambda: (self._environment.state_hash(), self._environment.step(text)))
        if not isinstance(step, Step) or not isinstance(step.reward, (int, float)):
            raise TypeError(f"{name}.step returned {step!r}; expected a Step whose reward is a number")
        if (step.observation is None) != (step.terminated or step.truncated):
            raise ValueError(f"{name}.step returned observation {step.observation!r} with terminated={step.terminated}, "
                             f"truncated={step.truncated}; expected an observation exactly while the episode goes on")
        if not math.isfinite(step.reward):
            raise ValueError(f"{name}.step returned reward {step.reward} at turn {self.turn}; expected a finite number")
        return state_hash, step

    async def off_loop(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run the environment's code: off the event loop and with a deadline, unless the environment is instant."""
        started = time.time()
        try:
            if self._environment.instant:
                return function(*args)
            return await self._in_thread(what, function, *args)
        finally:
            if self._timeline is not None and time.time() - started > NOTED:
                self._timeline.add(what, started, time.time(), "environment", flight=True)

    async def _in_thread(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        deadline = asyncio.timeout(self._settings.step_timeout)
        try:
            async with deadline:
                return await asyncio.to_thread(function, *args)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the environment's own
            raise TimeoutError(f"{what} took longer than environment.step_timeout ({self._settings.step_timeout:g} s) at turn {self.turn}") from error


async def _before(cutoff: float, engine: Sampler, context: Sequence[int], sampling: Sampling) -> Completion | None:
    """The response, or None when `cutoff` comes first; the engine's request is then gone."""
    if not cutoff:
        return await engine.generate(context, sampling)
    deadline = asyncio.timeout(max(0.0, cutoff - time.time()))
    try:
        async with deadline:
            return await engine.generate(context, sampling)
    except TimeoutError:
        if not deadline.expired():
            raise  # the engine's own
        return None


def _record(turn: int, context: Sequence[int], completion: Completion, sampling: Sampling, step: Step, state_hash: str, *,
            kind: str = "action", train_context_ids: tuple[int, ...] = ()) -> TurnRecord:
    """A summary's `state_hash` is its turn's: of S_k, the boundary before l_k."""
    return TurnRecord(
        turn=turn, context_ids=tuple(context), context_hash=context_hash(context), response_ids=completion.token_ids,
        engine_logprobs=completion.logprobs, weight_version=completion.weight_version, seed=sampling.seed,
        temperature=sampling.temperature, finish_reason=completion.finish_reason,
        observation=step.observation.text if step.observation else "", reward=step.reward, state_hash=state_hash,
        tool_calls=int(step.info.get("tool_calls", 0)), malformed_calls=int(step.info.get("malformed_calls", 0)),
        failed_calls=int(step.info.get("failed_calls", 0)),
        cached_prompt_tokens=completion.cached_prompt_tokens, shareable_prompt_tokens=completion.shareable_prompt_tokens,
        kind=kind, train_context_ids=train_context_ids)
