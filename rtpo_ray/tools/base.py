"""The tool contract: methods that a model may call, marked with `@tool`, and sets of them that environments share.

    class Clock(Toolset):
        instant = True

        @tool
        def time(self, zone: str) -> str:
            \"\"\"The time of day.

            Args:
                zone: of the world, such as UTC
            \"\"\"
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any


class ToolError(Exception):
    """A call that was run and failed in a way that the model is to read: it becomes the observation `error: ...` and is counted.

    What a tool raises besides is the tool's own fault: it costs the rollout, which is tried again and then counted as failed.
    """


def tool(method: Callable[..., str]) -> Callable[..., str]:
    """Mark a method as a tool. Its type hints and Google-style docstring become its JSON schema."""
    method._is_tool = True  # type: ignore[attr-defined]
    return method


class Toolset:
    """Tools that environments share, with the state that belongs to one episode.

    Its state is what pickle keeps of it (`__getstate__`): snapshots and state hashes of the environment are made of that. Leave out
    processes, connections and caches there, and make them again when they are needed.

    Attributes:
        instant: declare True when every call takes well under a millisecond and waits for nothing.
        longest_wait: seconds that a call may take by the tool's own deadlines, 0 where it has none; environment.step_timeout must be above it.
        replay: declare True when the state cannot be pickled; a snapshot is then the seed and the responses so far.
    """

    instant: bool = False
    replay: bool = False
    longest_wait: float = 0.0

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, made by transformers from hints and docstrings."""
        from transformers.utils import get_json_schema

        return [_drop_return(get_json_schema(method)) for method in self._methods().values()]

    def names(self) -> list[str]:
        """Of the tools."""
        return list(self._methods())

    def misfit(self, name: str, arguments: dict[str, Any]) -> str:
        """Why `arguments` cannot be given to the tool `name`; empty when they can."""
        return _wrong_arguments(self._methods()[name], arguments)

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a call that fits. Raises ToolError with what the model should read."""
        return str(self._methods()[name](**arguments))

    def branching_error(self) -> str:
        """Why a method that restores states cannot use these tools; empty when it can. Asked before a run starts."""
        return ""

    def close(self) -> None:
        """Let go of processes and connections; the episode is over. May be called twice."""

    def _methods(self) -> dict[str, Callable[..., str]]:
        return {name: getattr(self, name) for name in _tool_names(type(self))}  # type: ignore[arg-type]  # mypy takes a class for one without a hash


@functools.cache
def _tool_names(toolset: type) -> tuple[str, ...]:
    """Every call of a tool asks, and looking through all members takes longer than most tools."""
    return tuple(name for name, member in inspect.getmembers(toolset) if getattr(member, "_is_tool", False))


_JSON_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}


def _wrong_arguments(method: Callable[..., str], arguments: dict[str, Any]) -> str:
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
