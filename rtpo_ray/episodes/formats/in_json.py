"""Calls whose arguments are one JSON object: hermes, llama3, mistral, deepseek."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rtpo_ray.episodes.formats.base import (
    BROKEN,
    Call,
    CallFormat,
    MalformedCall,
    Message,
    Schemas,
    StructuredFormat,
    ToolCall,
    call_of,
    json_at,
    skip,
    wrong_json,
)


class Hermes(CallFormat):
    """Qwen2.5, Qwen3, Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number."""

    name = "hermes"
    hints = ("<tool_call>",)
    opener = begin = "<tool_call>"
    closer = "</tool_call>"

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>" for call in calls)

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        start = mark.end()
        try:
            value, end = json_at(text, start)
        except BROKEN as error:
            close = _after(text, start)
            if not text.startswith(self.closer, close):
                return [MalformedCall("<tool_call> is not closed by </tool_call>")], close
            return [wrong_json(error, start)], close + len(self.closer)
        if text.startswith(self.closer, end):
            return [call_of(value)], end + len(self.closer)
        close = _after(text, end)
        if not text.startswith(self.closer, close):
            return [MalformedCall("<tool_call> is not closed by </tool_call>")], close
        return [MalformedCall(f"tool call is not JSON: Extra data at character {end - start}")], close + len(self.closer)


def _after(text: str, start: int) -> int:
    """Where a call ends that cannot be read: at the next tag, or with the text."""
    found = re.compile("</?tool_call>").search(text, start)
    return found.start() if found else len(text)


class Llama3(CallFormat):
    """Llama 3.x: bare objects `{"name": ..., "parameters": {...}}`, several one after the other, `;` or a new line between them, with or
    without `<|python_tag|>` before. An object with a "name" is meant as a call, any other is part of the answer."""

    name = "llama3"
    hints = ("<|python_tag|>", "ipython", '"parameters": dictionary')
    stops = ("<|eot_id|>", "<|eom_id|>")
    opener = r"<\|python_tag\|>|\{"

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls)

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        tagged = mark.group() != "{"
        start = skip(text, mark.end()) if tagged else mark.start()
        if tagged and not text.startswith("{", start):
            return [MalformedCall('<|python_tag|> must be followed by {"name": ..., "parameters": {...}}')], _next_object(text, start)
        try:
            value, end = json_at(text, start)
        except BROKEN as error:
            if not tagged and not re.compile(r"""\{\s*["']?(name|parameters|arguments)\b""").match(text, start):
                return [], start + 1 if isinstance(error, json.JSONDecodeError) else len(text)
            return [wrong_json(error, start)], _next_object(text, start)
        if not tagged and "name" not in value:
            return [], end
        return [call_of(value, ("parameters", "arguments"), also=("type",))], end


def _next_object(text: str, start: int) -> int:
    """Where the next call may begin after one that cannot be read."""
    found = re.compile(r"[;\n]\s*(?=\{)|(?=<\|python_tag\|>)").search(text, start + 1)
    return found.end() if found else len(text)


class Mistral(StructuredFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer `[TOOL_CALLS]name[ARGS]{...}` for every call. Of ids only
    the last is used: the result bears it."""

    name = "mistral"
    hints = ("[TOOL_CALLS]",)
    opener = r"\[TOOL_CALLS\]"
    _id = re.compile(r'(?:"id":\s*"|\[CALL_ID\])(\w{9})\b')

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "[TOOL_CALLS]" + json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        start = mark.end()
        named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?(?=\s*\{)").match(text, start)
        begin = named.end() if named else start
        try:
            value, end = json_at(text, begin)
        except BROKEN as error:
            found = re.compile(self.opener).search(text, start)
            return [wrong_json(error, begin)], found.start() if found else len(text)
        if named:
            return [ToolCall(named.group(1), value)], end
        value = [value] if isinstance(value, dict) else value
        if not isinstance(value, list) or not value:
            return [MalformedCall('[TOOL_CALLS] must be followed by a list of {"name": ..., "arguments": {...}} or by name[ARGS]{...}')], end
        return [call_of(one, also=("id",)) for one in value], end

    def recipient(self, text: str) -> str:
        if not any(isinstance(call, ToolCall) for call in self.read(text).calls):
            return ""
        return (self._id.findall(text) or ["000000000"])[-1]  # templates insist on nine characters

    def observed(self, role: str, text: str, name: str) -> Message:
        message = super().observed(role, text, name)
        return {**message, "tool_call_id": name} if message["role"] == "tool" else message

    def called(self, calls: Sequence[ToolCall], name: str) -> Message:
        message = super().called(calls, name)
        return {**message, "tool_calls": [{**call, "id": name} for call in message["tool_calls"]]}

    def messages(self, text: str, role: str, observation: str, *, strip: bool) -> list[Message]:
        said, name = self.strip_thought(text) if strip else text, self.recipient(text) if role == "tool" else ""
        turn: Message = {"role": "assistant", "content": said}
        if name:
            calls = [call for call in self.read(text).calls if isinstance(call, ToolCall)]
            turn = {**self.called(calls, name), "content": said.partition("[TOOL_CALLS]")[0]}
        return [turn, self.observed(role, observation, name)]


class DeepSeek(CallFormat):
    """V3, R1: the type of tool, a separator, the name, then the arguments in a fence; V3.1: name, separator, arguments."""

    name = "deepseek"
    hints = ("<｜tool▁call▁begin｜>",)
    opener = "<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>"
    begin, closer = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    _head = re.compile(r"\s*(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n|([^\n<]+)<｜tool▁sep｜>)")
    _tail = re.compile(r"(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")

    def format(self, calls: Sequence[ToolCall]) -> str:
        inner = "\n".join(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{json.dumps(call.arguments)}\n```<｜tool▁call▁end｜>"
                          for call in calls)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        if mark.group() == "<｜tool▁calls▁begin｜>":
            begin = skip(text, mark.end())
            follows = text.startswith("<｜tool▁call▁begin｜>", begin)
            return [] if follows else [MalformedCall("<｜tool▁calls▁begin｜> without a call")], begin
        found = re.compile(f"{self.closer}|(?={self.opener})").search(text, mark.end())
        resume = found.end() if found else len(text)
        head = self._head.match(text, mark.end())
        if head is None:
            return [MalformedCall("tool call must be function<｜tool▁sep｜>name, then the arguments as ```json")], resume
        try:
            arguments, end = json_at(text, head.end())
        except BROKEN as error:
            return [wrong_json(error, head.end(), "the argument object of the tool call")], resume
        tail = self._tail.match(text, end)
        if tail is None:
            return [MalformedCall("tool call is not closed by <｜tool▁call▁end｜>")], resume
        return [call_of({"name": (head.group(1) or head.group(2)).strip(), "arguments": arguments})], tail.end()
