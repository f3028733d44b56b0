"""Episodes without a model: what a script says in them, made up from the schemas of the tools."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rtpo_ray.environments.base import Environment, ToolEnvironment
from rtpo_ray.episodes.episode import Episode
from rtpo_ray.episodes.toolcalls import FORMATS, ToolCall


class Script:
    """What is said in an episode: by turns a demonstration, a call of each tool, one that is malformed, and at last an answer."""

    def __init__(self, number: int, max_turns: int) -> None:
        self._rng, self._last, self._number = random.Random(number), max_turns - 1, number

    def __call__(self, episode: Episode) -> str:
        environment, turn = episode.environment, episode.turn
        demonstrates = type(environment).demonstrate is not Environment.demonstrate
        if demonstrates and self._number % 2 == 0:
            return environment.demonstrate(self._rng, 0.3)
        schemas = environment.tools()
        if not schemas or turn >= self._last:
            return f"I say {self._rng.choice(['42', 'yes', 'unknown'])}."
        calls = [ToolCall(schema["function"]["name"], _arguments(schema["function"], self._rng)) for schema in schemas[:4]]
        self._rng.shuffle(calls)
        form = environment.calls if isinstance(environment, ToolEnvironment) else "hermes"
        text = FORMATS[form].format(calls[: 1 + turn % 2])
        return text[: len(text) // 2] if turn == 1 and self._number % 4 == 1 else text


def _arguments(function: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Values that fit a tool's schema."""
    values: dict[str, Callable[[], Any]] = {
        "string": lambda: rng.choice(["1 + 1", "who"]), "integer": lambda: rng.randint(0, 9), "number": rng.random,
        "boolean": lambda: rng.random() < 0.5, "array": list, "object": dict}
    found: dict[str, Any] = {}
    for name, spec in function.get("parameters", {}).get("properties", {}).items():
        found[name] = rng.choice(spec["enum"]) if spec.get("enum") else values.get(spec.get("type"), values["string"])()
    return found
