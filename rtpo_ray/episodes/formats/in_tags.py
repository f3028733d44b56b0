"""Calls whose arguments are tagged one by one, or written as Python: qwen3_coder, glm, pythonic."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rtpo_ray.episodes.formats.base import BROKEN, Call, CallFormat, MalformedCall, Schemas, ToolCall, skip


class Tagged(CallFormat):
    """A name, then tagged arguments. Text that is meant for a parameter of type string stays text; any other is read as JSON where it is JSON."""

    head: re.Pattern[str]  # group 1: the name
    argument: re.Pattern[str]  # groups 1 and 2: name and text of an argument
    tail: re.Pattern[str]
    form: str  # what a call looks like, for the model

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        texts: dict[str, str] = {}
        head = self.head.match(text, mark.start())
        position = head.end() if head else mark.end()
        while head and (found := self.argument.match(text, position)):
            texts[found.group(1).strip()] = found.group(2)
            position = found.end()
        tail = self.tail.match(text, position)
        if head is None or tail is None:
            close = re.compile(f"{re.escape(self.closer)}|(?={self.opener})").search(text, position)
            whole = close is not None and close.group() == self.closer
            reason = f"tool call must look like {self.form}" if whole else f"tool call is not closed by {self.closer}"
            return [MalformedCall(reason)], close.end() if close else len(text)
        types = _types(head.group(1), tools())
        return [ToolCall(head.group(1), {name: _value(value, types.get(name, set())) for name, value in texts.items()})], tail.end()


class Qwen3Coder(Tagged):
    """Qwen3-Coder, Qwen3.5: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, a value on lines of its own."""

    name = "qwen3_coder"
    hints = ("<function=",)
    opener = "<tool_call>|<function="
    begin, closer = "<function=NAME>", "</function>"
    head = re.compile(r"(?:<tool_call>\s*)?<function=([^>\s]+)>\s*")
    argument = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    tail = re.compile(r"</function>(?:\s*</tool_call>)?")
    form = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>\n<function={call.name}>\n" + "".join(
            f"<parameter={name}>\n{_text(value)}\n</parameter>\n" for name, value in call.arguments.items()) + "</function>\n</tool_call>"
            for call in calls)


class Glm(Tagged):
    """GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    name = "glm"
    hints = ("<arg_key>",)
    opener = begin = "<tool_call>"
    closer = "</tool_call>"
    head = re.compile(r"<tool_call>\s*([^<\s]+)\s*")
    argument = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
    tail = re.compile(r"</tool_call>")
    form = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>{call.name}\n" + "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for name, value in call.arguments.items()) + "</tool_call>"
            for call in calls)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _types(name: str, schemas: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """The declared types of every parameter of the tool `name`."""
    for schema in schemas:
        if schema["function"]["name"] == name:
            return {key: _declared(spec) for key, spec in schema["function"].get("parameters", {}).get("properties", {}).items()}
    return {}


def _declared(spec: Mapping[str, Any]) -> set[str]:
    own = spec.get("type")
    found = set(own if isinstance(own, list) else [own] if own else [])
    return found.union(*(_declared(one) for one in (*spec.get("anyOf", ()), *spec.get("oneOf", ()))))


def _value(text: str, declared: set[str]) -> Any:
    """What a parameter of these types is given: where it may be a text, it is one unless it is JSON of another of its types."""
    try:
        value = json.loads(text)
    except BROKEN:
        return text
    kind = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}.get(type(value), "string")
    fits = kind in declared or (kind == "integer" and "number" in declared)
    return value if "string" not in declared or (fits and kind != "string") else text


class Pythonic(CallFormat):
    """Llama 4, LFM2, Olmo 3: `[name(key=value), ...]`, LFM2 between `<|tool_call_start|>` and `<|tool_call_end|>`. Without those, the list must
    end the response."""

    name = "pythonic"
    hints = ("<|tool_call_start|>", "<|tool_list_start|>", "func_name1(")
    opener = r"<\|tool_call_start\|>|(?<![\\\w])\[\s*(?=[A-Za-z_][\w.]*\s*\()"  # no bracket of mathematics
    begin, closer = "<|tool_call_start|>", "<|tool_call_end|>"

    def format(self, calls: Sequence[ToolCall]) -> str:
        return "[" + ", ".join(f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})" for call in calls) + "]"

    def _take(self, text: str, mark: re.Match[str], tools: Schemas) -> tuple[list[Call], int]:
        tagged = mark.group() == "<|tool_call_start|>"
        start = skip(text, mark.end()) if tagged else mark.start()
        end = resume = len(text)
        if tagged:
            end = text.find(self.closer, start)
            if end < 0:
                return [MalformedCall("<|tool_call_start|> is not closed by <|tool_call_end|>")], len(text)
            resume = end + len(self.closer)
        try:
            tree = ast.parse(text[start:end].strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if not tagged and not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(\s*(?:\)|[A-Za-z_]\w*\s*=)", text[start:]):
                return [], resume  # a list in a sentence
            return [MalformedCall(f"tool calls are not a Python list of calls: {getattr(error, 'msg', error)}")], resume
        if not isinstance(tree, ast.List) or not tree.elts:
            if not tagged:
                return [], resume  # arithmetic with a list
            return [MalformedCall("tool calls must be a list, [name(key=value)]")], resume
        return [_called(node) for node in tree.elts], resume


def _called(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        return MalformedCall(f"{ast.unparse(node)[:80]} is not a call, name(key=value)")
    if node.args or any(word.arg is None for word in node.keywords):
        return MalformedCall(f"{ast.unparse(node.func)[:80]}: every argument needs its name, name(key=value)")
    try:
        return ToolCall(ast.unparse(node.func), {str(word.arg): ast.literal_eval(_Json().visit(word.value)) for word in node.keywords})
    except (ValueError, TypeError, RecursionError) as error:
        return MalformedCall(f"{ast.unparse(node.func)[:80]}: an argument is no plain value: {error}")


class _Json(ast.NodeTransformer):
    """Models also write JSON's words for True, False and None."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802 - the name that ast asks for
        words: dict[str, bool | None] = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node
