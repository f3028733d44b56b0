"""Tool calls in Hermes form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number a response."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be run; `reason` is written for the model to read."""

    reason: str


def format_hermes(name: str, arguments: dict[str, Any]) -> str:
    """The text of one call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def parse_hermes(text: str) -> list[ToolCall | MalformedCall]:
    """Every call of a response, in order; a broken one is reported as such, never dropped. Empty: no call was tried."""
    calls = [_parse_one(match.group(1), closed=match.group(2) == "</tool_call>") for match in _CALL.finditer(text)]
    if not calls and "</tool_call>" in text:
        return [MalformedCall("</tool_call> without <tool_call>")]
    return calls


def _parse_one(body: str, *, closed: bool) -> ToolCall | MalformedCall:
    if not closed:
        return MalformedCall("<tool_call> is not closed by </tool_call>")
    try:
        call = json.loads(body)
    except json.JSONDecodeError as error:
        return MalformedCall(f"tool call is not JSON: {error.msg} at character {error.pos}")
    except RecursionError:
        return MalformedCall("tool call is nested too deeply")
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return MalformedCall('tool call needs exactly the keys "name" and "arguments"')
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        return MalformedCall('"name" must be a string and "arguments" an object')
    return ToolCall(call["name"], call["arguments"])


FORMATS: dict[str, Callable[[str], list[ToolCall | MalformedCall]]] = {"hermes": parse_hermes}
