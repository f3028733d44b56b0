"""The environment contract, and `ToolEnvironment`, which turns methods into tools.

    class Echo(ToolEnvironment):
        def reset(self, seed):
            self.word = random.Random(seed).choice(["red", "blue"])
            return Observation(f"Say {self.word}.")

        def answer(self, text):
            return Step(reward=float(text == self.word), terminated=True)
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtpo_ray.episodes.toolcalls import FORMATS, MalformedCall, ToolCall
from rtpo_ray.tools.base import ToolError, Toolset, tool

__all__ = ["Environment", "Observation", "Step", "ToolEnvironment", "ToolError", "Toolset", "tool"]

_GIVEN = ("row", "calls")  # attributes that whoever makes or resets the environment sets: in no snapshot and no hash


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment tells the model: a message of the chat."""

    text: str
    role: str = "user"
    before: tuple[tuple[str, str], ...] = ()  # of the first one of an episode: messages (role, text) that stand before it, such as examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The outcome of one response, in Gymnasium's words."""

    observation: Observation | None = None  # None exactly when the episode is over
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, float] = field(default_factory=dict)


class Environment:
    """One episode's world.

    Attributes:
        rng: the environment's only source of randomness; set it from the seed in `reset`.
        replay: declare True when the state cannot be copied; a snapshot is then the seed and the responses so far, and
            `restore` plays them again.
        instant: declare True when a step takes well under a millisecond and waits for nothing; it then runs between two steps of the
            engine. Otherwise it runs in a thread, with the deadline environment.step_timeout.
        unsaved: names of attributes that no snapshot and no hash may hold; every process sets them when it makes the environment.
        constant: names of attributes that follow from the seed and never change; the state hash, taken every turn, leaves them out.
        system: text of the system message; empty for none.
        fields: of the task's row of data that `reset` reads, when the tasks come from files (the section `data` of the configuration).
        row: the task's row of data, by field; set before `reset`.
    """

    replay: bool = False
    instant: bool = False
    constant: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    system: str = ""
    fields: tuple[str, ...] = ()
    longest_wait: float = 0.0  # seconds that a step may take by the deadlines of its own parts, where they are known
    row: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def check(self, max_turns: int) -> None:
        """Raise ValueError when the arguments make every episode of `max_turns` turns hopeless."""

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the chat template."""
        return []

    def branching_error(self) -> str:
        """Why no sibling can start from one of its boundaries; empty when they can."""
        return ""

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`: the same seed gives the same episode."""
        raise TypeError(f"{type(self).__name__} must define reset(seed)")

    def step(self, response_text: str) -> Step:
        """Take the model's whole response of one turn."""
        raise TypeError(f"{type(self).__name__} must define step(response_text)")

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """A scripted response for the present state, for warm starts; wrong with probability `noise`."""
        raise TypeError(f"{type(self).__name__} has no scripted demonstrations, so no warm start; set model.path instead")

    def snapshot(self) -> Any:
        """The whole state. The default is a deep copy of the attributes, made by pickle: it must travel anyway, and pickle is faster."""
        return pickle.dumps({name: value for name, value in vars(self).items() if name not in (*self.unsaved, *_GIVEN)})

    def restore(self, snapshot: Any) -> None:
        """Take back a state that `snapshot` made; the snapshot can be restored many times."""
        own = {name: vars(self)[name] for name in (*self.unsaved, *_GIVEN) if name in vars(self)}
        self.__dict__.clear()
        self.__dict__.update(pickle.loads(snapshot) | own)

    def state_hash(self) -> str:
        """Hash of the whole state; equal states give equal hashes in every process."""
        state = {name: value for name, value in vars(self).items() if name not in (*self.constant, *self.unsaved, *_GIVEN)}
        return hashlib.blake2b(_canonical(state).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Let go of processes and connections; the episode is over. May be called twice."""


class ToolEnvironment(Toolset, Environment):
    """An environment with tools: its own `@tool` methods and those of its `toolsets`. A response without a call is the answer,
    without its thoughts; one whose thought never ends, so that nothing was said, is an empty answer.

    Attributes:
        toolsets: sets of tools beside its own, part of its state.
        calls: key of `toolcalls.FORMATS`, how the model writes a call; set by whoever makes the environment.
    """

    calls: str = "hermes"

    def __init__(self, toolsets: Sequence[Toolset] = ()) -> None:
        super().__init__()
        self.toolsets = tuple(toolsets)
        self.longest_wait = max((toolset.longest_wait for toolset in self.toolsets), default=0.0)

    def tools(self) -> list[dict[str, Any]]:
        return [schema for provider in self._providers() for schema in provider.schemas()]

    def branching_error(self) -> str:
        return next(filter(None, (toolset.branching_error() for toolset in self.toolsets)), "")

    def answer(self, text: str) -> Step:
        """Judge a response that calls no tool."""
        raise TypeError(f"{type(self).__name__} must define answer(text)")

    def step(self, response_text: str) -> Step:
        """Run the tool calls in order, or judge the answer. A call that is malformed or fails becomes an observation that says what was wrong."""
        reading = FORMATS[self.calls].read(response_text, self.tools)
        if not reading.calls:
            return self.answer(reading.text.strip())
        results = [self._call(call) for call in reading.calls]
        kinds = [kind for _, kind in results]
        return Step(observation=Observation("\n".join(text for text, _ in results), role="tool"),
                    info={"tool_calls": len(reading.calls), "malformed_calls": kinds.count("malformed"), "failed_calls": kinds.count("failed")})

    def close(self) -> None:
        with contextlib.ExitStack() as every:  # also when one of them raises
            for toolset in self.toolsets:
                every.callback(toolset.close)

    def _providers(self) -> tuple[Toolset, ...]:
        return (self, *self.toolsets)

    def _call(self, call: ToolCall | MalformedCall) -> tuple[str, str]:
        """(observation, how the call went: run, malformed or failed)."""
        if isinstance(call, MalformedCall):
            return f"error: {call.reason}", "malformed"
        by_name = {name: provider for provider in self._providers() for name in provider.names()}
        if call.name not in by_name:
            return f"error: no tool named {call.name!r}; there is {', '.join(by_name)}", "malformed"
        if wrong := by_name[call.name].misfit(call.name, call.arguments):
            return f"error: {call.name}: {wrong}", "malformed"
        try:
            return by_name[call.name].run(call.name, call.arguments), "run"
        except ToolError as error:
            return f"error: {call.name}: {error}", "failed"


def _canonical(value: Any) -> str:
    """A text that is equal for equal states, whatever the order of insertion or the identity of objects."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{_canonical(k)}:{_canonical(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "<" + ",".join(sorted(map(_canonical, value))) + ">"
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()  # 625 words: their text would cost more than all the rest
        return f"{version}:{array('Q', words).tobytes().hex()}:{gauss!r}"
    if hasattr(value, "__dict__"):
        return type(value).__qualname__ + _canonical(value.__getstate__())
    return hashlib.blake2b(pickle.dumps(value), digest_size=8).hexdigest()
