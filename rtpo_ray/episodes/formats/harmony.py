"""gpt-oss: a response is a row of messages, each with a channel: analysis is thought, a recipient makes a call, final is the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rtpo_ray.episodes.formats.base import BROKEN, Call, MalformedCall, Message, Reading, Schemas, StructuredFormat, ToolCall, call_of, wrong_json

_MARK = re.compile(r"(<\|(?:start|channel|message|end|call|return)\|>)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CONTROL = re.compile(r"<\|\w+\|>")


class Harmony(StructuredFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. The response's last `<|call|>` is the token that
    ends it, so a call whose JSON is whole needs none. A response with no channel at all is an answer."""

    name = "harmony"
    hints = ("<|channel|>",)
    stops = ("<|return|>", "<|call|>")

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{json.dumps(call.arguments)}<|call|>" for call in calls)

    def read(self, text: str, tools: Schemas = list) -> Reading:
        calls, final, _ = _split(text)
        return Reading(calls, final)

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        raise AssertionError("harmony reads messages, not marks")

    def recipient(self, text: str) -> str:
        return next((call.name for call in reversed(_split(text)[0]) if isinstance(call, ToolCall)), "")

    def called(self, calls: Sequence[ToolCall], name: str) -> Message:
        return super().called([ToolCall(name, call.arguments) for call in calls], name)

    def messages(self, text: str, role: str, observation: str, *, strip: bool) -> list[Message]:
        """One message a call: the template shows no more in one."""
        calls, final, thought = _split(text)
        turn = [self.called([call], call.name) for call in calls if isinstance(call, ToolCall)]
        name = self.recipient(text)
        if not turn:
            turn = [{"role": "assistant", "content": _CONTROL.sub(" ", text).strip() if calls else final}]
        if thought and not strip:
            turn[0]["thinking"] = thought
        return [*turn, self.observed(role, observation, name)]


def _messages(text: str) -> list[tuple[str, str | None]]:
    """(header, body) of every message of a response; the body is None where the header never ends."""
    messages: list[tuple[str, str | None]] = []
    header, body = "", None
    for piece in _MARK.split(text):
        if piece == "<|message|>" and body is None:
            body = ""
        elif piece in _ENDS or (piece == "<|channel|>" and body is not None):
            messages.append((header, body))
            header, body = piece if piece == "<|channel|>" else "", None
        elif body is None:
            header += piece
        else:
            body += piece
    return [*messages, (header, body)]


def _split(text: str) -> tuple[list[Call], str, str]:
    """(calls, text of the final channel, thought) of a response."""
    calls: list[Call] = []
    finals, thoughts = [], []
    for header, body in _messages(text):
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient:
            calls.append(_call(recipient.group(1), body))
        elif body is None:
            continue
        elif channel is None or channel.group(1) == "final":
            finals.append(body)
        elif channel.group(1) == "analysis":
            thoughts.append(body)
    if not calls and not _CONTROL.search(text):
        return [], text, ""
    return calls, "".join(finals), "\n".join(thoughts)


def _call(recipient: str, body: str | None) -> Call:
    if body is None:
        return MalformedCall("the call has no <|message|> with its arguments")
    space, _, name = recipient.partition(".")
    if space != "functions" or not name:
        return MalformedCall(f"no recipient {recipient!r}; tools are called as functions.NAME")
    try:
        arguments = json.loads(body)
    except BROKEN as error:
        return wrong_json(error, 0, "the argument object of the tool call")
    return call_of({"name": name, "arguments": arguments})
