"""The environment contract, and `ToolEnvironment`, which turns methods into tools.

    class Echo(ToolEnvironment):
        def reset(self, seed):
            self.word = random.Random(seed).choice(["red", "blue"])
            return Observation(f"Say {self.word}.")

        def answer(self, text):
            return Step(reward=float(text == self.word), terminated=True)
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rtpo_ray.episodes.toolcalls import MalformedCall, ToolCall, parse_hermes


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment tells the model: a message of the chat."""

    text: str
    role: str = "user"


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
    """

    replay: bool = False
    instant: bool = False
    constant: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    system: str = ""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def check(self, max_turns: int) -> None:
        """Raise ValueError when the arguments make every episode of `max_turns` turns hopeless."""

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the chat template."""
        return []

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
        return pickle.dumps({name: value for name, value in vars(self).items() if name not in self.unsaved})

    def restore(self, snapshot: Any) -> None:
        """Take back a state that `snapshot` made; the snapshot can be restored many times."""
        own = {name: vars(self)[name] for name in self.unsaved if name in vars(self)}
        self.__dict__.clear()
        self.__dict__.update(pickle.loads(snapshot) | own)

    def state_hash(self) -> str:
        """Hash of the whole state; equal states give equal hashes in every process."""
        state = {name: value for name, value in vars(self).items() if name not in (*self.constant, *self.unsaved)}
        return hashlib.blake2b(_canonical(state).encode(), digest_size=8).hexdigest()


def tool(method: Callable[..., str]) -> Callable[..., str]:
    """Mark a method as a tool. Its type hints and Google-style docstring become its JSON schema."""
    method._is_tool = True  # type: ignore[attr-defined]
    return method


class ToolEnvironment(Environment):
    """An environment whose `@tool` methods the model calls in Hermes form; a response without a call is the answer."""

    def tools(self) -> list[dict[str, Any]]:
        """Schemas made by transformers from hints and docstrings."""
        from transformers.utils import get_json_schema

        return [_drop_return(get_json_schema(method)) for method in self._tools().values()]

    def answer(self, text: str) -> Step:
        """Judge a response that calls no tool."""
        raise TypeError(f"{type(self).__name__} must define answer(text)")

    def step(self, response_text: str) -> Step:
        """Run the tool calls in order, or judge the answer. A malformed call becomes an observation that says what was wrong."""
        calls = parse_hermes(response_text)
        if not calls:
            return self.answer(response_text.strip())
        results = [self._call(call) for call in calls]
        malformed = sum(isinstance(call, MalformedCall) or failed for call, (_, failed) in zip(calls, results, strict=True))
        text = "\n".join(result for result, _ in results)
        return Step(observation=Observation(text, role="tool"), info={"tool_calls": len(calls), "malformed_calls": malformed})

    def _tools(self) -> dict[str, Callable[..., str]]:
        names = [name for name, member in inspect.getmembers(type(self)) if getattr(member, "_is_tool", False)]
        return {name: getattr(self, name) for name in names}

    def _call(self, call: ToolCall | MalformedCall) -> tuple[str, bool]:
        """(observation, whether the call was malformed)."""
        if isinstance(call, MalformedCall):
            return f"error: {call.reason}", True
        tools = self._tools()
        if call.name not in tools:
            return f"error: no tool named {call.name!r}; there is {', '.join(tools)}", True
        wrong = _wrong_arguments(tools[call.name], call.arguments)
        if wrong:
            return f"error: {call.name}: {wrong}", True
        return str(tools[call.name](**call.arguments)), False


_JSON_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}


def _wrong_arguments(method: Callable[..., str], arguments: dict[str, Any]) -> str:
    """Why `arguments` do not fit the method; empty when they do."""
    try:
        inspect.signature(method).bind(**arguments)
    except TypeError as error:
        return str(error)
    for name, value in arguments.items():
        hint = str(inspect.get_annotations(method).get(name, "")).removeprefix("<class '").removesuffix("'>")
        expected = _JSON_TYPES.get(hint)
        if expected is not None and (not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)):
            return f"argument {name!r} is {json.dumps(value)}; expected {hint}"
    return ""


def _drop_return(schema: dict[str, Any]) -> dict[str, Any]:
    schema["function"].pop("return", None)
    return schema


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
        return repr(value.getstate())
    if hasattr(value, "__dict__"):
        return type(value).__qualname__ + _canonical(vars(value))
    return hashlib.blake2b(pickle.dumps(value), digest_size=8).hexdigest()
