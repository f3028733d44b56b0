"""What a format of tool calls is: how a response is read, how calls are written, and how a turn becomes messages of the chat."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Schemas = Callable[[], list[dict[str, Any]]]  # JSON schemas of the tools; asked for only where they decide how an argument is read

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be run; `reason` is written for the model to read."""

    reason: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class Reading:
    """What a response says.

    Attributes:
        calls: every call in order; a broken or unclosed one is malformed, never dropped. Empty: no call was tried.
        text: what is left without the thoughts: where nothing is called, the answer. A thought that never ends leaves nothing after it.
    """

    calls: list[Call]
    text: str


class CallFormat(ABC):
    """Thoughts are `<think>...</think>`; where only the end is written, all before it is thought. Nothing inside a thought is a call, and
    no marker inside the arguments of a call counts.

    Attributes:
        name: key of `toolcalls.FORMATS`.
        hints: texts of which one in a chat template marks the format.
        stops: tokens that end a response in this format, beside the one that the chat template ends it with.
        opener: what a call begins with.
        begin, closer: how a call begins and ends, as the model is told; `closer` alone, without any call, is a call that lacks its beginning.
    """

    name: str
    hints: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    opener: str = ""
    begin: str = ""
    closer: str = ""

    def read(self, text: str, tools: Schemas = list) -> Reading:
        """Calls and answer of a response."""
        marks = re.compile(rf"<think>|</think>\s*|{self.opener}", re.DOTALL)
        calls: list[Call] = []
        said: list[str] = []
        position = 0
        while mark := marks.search(text, position):
            said.append(text[position: mark.start()])
            if mark.group() == "<think>":
                end = re.compile(r"</think>\s*").search(text, mark.end())
                position = end.end() if end else len(text)
            elif mark.group().startswith("</think>"):
                calls, said, position = [], [], mark.end()
            else:
                found, position = self._take(text, mark, tools)
                calls += found
                said.append(text[mark.start(): position])
        rest = "".join([*said, text[position:]])
        if not calls and self.closer and self.closer in rest:
            calls = [MalformedCall(f"{self.closer} without {self.begin}")]
        return Reading(calls, rest)

    def strip_thought(self, text: str) -> str:
        """The response without its thoughts."""
        return self.read(text).text

    @abstractmethod
    def format(self, calls: Sequence[ToolCall]) -> str:
        """The text of the calls, as `read` takes them."""

    @abstractmethod
    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        """The calls that begin at `mark`, and where the text goes on, after `mark.start()`."""

    def recipient(self, text: str) -> str:
        """What the chat template wants named where it shows the results of the response `text`: the tool, or the call's id. Empty: nothing."""
        return ""

    def observed(self, role: str, text: str, name: str) -> Message:
        """The message of an observation; `name` is the `recipient` of the response before it."""
        return {"role": role, "content": text}

    def messages(self, text: str, role: str, observation: str, *, strip: bool) -> list[Message]:
        """The turn as messages of the chat: a response and what was observed, said by `role`. `strip`: without the response's thoughts."""
        said = self.strip_thought(text) if strip else text
        return [{"role": "assistant", "content": said}, self.observed(role, observation, "")]

    def samples(self, marker: str, name: str) -> Iterator[Message]:
        """Responses with `marker` in them that try a template out: the call that `name` answers, or else text, with a thought and without."""
        yield {"role": "assistant", "content": marker}
        yield {"role": "assistant", "content": f"<think>\nthought\n</think>\n\n{marker}"}


class StructuredFormat(CallFormat):
    """A format whose chat templates show a result only after the call itself, given to them as data. Where a response calls nothing that
    could be run, what is observed is therefore said by the user."""

    def observed(self, role: str, text: str, name: str) -> Message:
        return super().observed("user" if role == "tool" and not name else role, text, name)

    def samples(self, marker: str, name: str) -> Iterator[Message]:
        if not name:
            return super().samples(marker, name)
        return iter([self.called([ToolCall("f", {"reply": marker})], name)])

    def called(self, calls: Sequence[ToolCall], name: str) -> Message:
        """The assistant message of `calls`."""
        return {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]}


def json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, spaces around it skipped: (value, end). Raises what `wrong_json` explains."""
    value, end = _DECODER.raw_decode(text, skip(text, start))
    return value, skip(text, end)


def skip(text: str, start: int) -> int:
    """Where the spaces at `start` end."""
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


BROKEN = (json.JSONDecodeError, RecursionError)  # what reading JSON raises


def wrong_json(error: Exception, start: int, what: str = "tool call") -> MalformedCall:
    """Why the JSON that begins at `start` cannot be read."""
    if isinstance(error, json.JSONDecodeError):
        return MalformedCall(f"{what} is not JSON: {error.msg} at character {max(error.pos - start, 0)}")
    return MalformedCall(f"{what} is nested too deeply")


def call_of(value: Any, keys: Sequence[str] = ("arguments",), also: Sequence[str] = ()) -> Call:
    """The call that a JSON object with "name" and one of `keys` is; it may have `also`."""
    wanted = " or ".join(f'"{key}"' for key in keys)
    given = [key for key in keys if isinstance(value, dict) and key in value]
    if len(given) != 1 or "name" not in value or not set(value) <= {"name", *given, *also}:
        return MalformedCall(f'tool call needs exactly the keys "name" and {wanted}')
    name, arguments = value["name"], value[given[0]]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return MalformedCall(f'"name" must be a string and {wanted} an object')
    return ToolCall(name, arguments)
