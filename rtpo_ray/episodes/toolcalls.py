"""Formats of tool calls by name, and which of them a chat template speaks.

    reading = FORMATS["hermes"].read(response_text)
    reading.calls  # in order, malformed ones with the reason; empty: reading.text is the answer
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rtpo_ray.episodes.formats.base import CallFormat, MalformedCall, Reading, StructuredFormat, ToolCall
from rtpo_ray.episodes.formats.harmony import Harmony
from rtpo_ray.episodes.formats.in_json import DeepSeek, Hermes, Llama3, Mistral
from rtpo_ray.episodes.formats.in_tags import Glm, Pythonic, Qwen3Coder

__all__ = ["FORMATS", "CallFormat", "MalformedCall", "Reading", "StructuredFormat", "ToolCall", "describe_tools", "format_hermes", "recognise"]

# In this order a template is recognised: two of them also write <tool_call>, as hermes does.
FORMATS: dict[str, CallFormat] = {spoken.name: spoken for spoken in (
    Harmony(), Mistral(), DeepSeek(), Glm(), Qwen3Coder(), Pythonic(), Hermes(), Llama3())}


def recognise(template: str) -> str:
    """Key of the format that the text of a chat template mentions; hermes where it mentions none."""
    return next((name for name, spoken in FORMATS.items() if any(hint in template for hint in spoken.hints)), "hermes")


def describe_tools(spoken: CallFormat, schemas: Sequence[dict[str, Any]]) -> str:
    """What tells a model of its tools when its chat template does not."""
    listed = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    example = spoken.format([ToolCall("NAME", {"ARGUMENT": "VALUE"})])
    return (f"You can call these tools:\n{listed}\nTo call one, write it like this, as often as needed:\n{example}\n"
            "A response without a call is your answer.")


def format_hermes(name: str, arguments: dict[str, Any]) -> str:
    """The text of one call in the format hermes."""
    return FORMATS["hermes"].format([ToolCall(name, arguments)])
