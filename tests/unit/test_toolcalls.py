"""Tool calls as models write them: every attempt is run or answered, none is dropped."""

import pytest

from rtpo_ray.episodes.toolcalls import FORMATS, MalformedCall, ToolCall, format_hermes


def parse_hermes(text):
    return FORMATS["hermes"].read(text).calls


def call(body):
    return f"<tool_call>{body}</tool_call>"


GOOD = '{"name": "f", "arguments": {"x": 1}}'
F = ToolCall("f", {"x": 1})


@pytest.mark.parametrize(("text", "expected"), [
    ("", []),
    ("Ada", []),
    ("I would use a tool_call here", []),
    (GOOD, []),  # without the tags it is an answer
    (call(GOOD), [F]),
    (call("\n" + GOOD + "\n"), [F]),
    ("<think>first f</think>\n" + call(GOOD) + " done", [F]),
    (call(GOOD) + "\n" + call('{"arguments": {}, "name": "g"}'), [F, ToolCall("g", {})]),
    (call('{"name": "f", "arguments": {"s": "</div> {\\"a\\": 1} \\u00e9"}}'), [ToolCall("f", {"s": '</div> {"a": 1} \u00e9'})]),
    (call('{"name": "f", "arguments": {"n": null, "l": [1, {"m": true}]}}'), [ToolCall("f", {"n": None, "l": [1, {"m": True}]})]),
])
def test_well_formed(text, expected):
    assert parse_hermes(text) == expected


@pytest.mark.parametrize(("body", "reason"), [
    ("", "tool call is not JSON: Expecting value at character 0"),
    ("f(1)", "not JSON"),
    ('{"name": "f", "arguments": {"x": 1}', "not JSON"),
    ("{'name': 'f', 'arguments': {}}", "not JSON"),
    (GOOD + GOOD, "not JSON: Extra data at character 36"),
    ('{"name": "f", "arguments": {"x": 1,}}', "not JSON"),
    ("[" * 100_000, "nested too deeply"),
    ("[]", 'needs exactly the keys "name" and "arguments"'),
    ("null", "needs exactly"),
    ('{"name": "f"}', "needs exactly"),
    ('{"name": "f", "parameters": {}}', "needs exactly"),
    ('{"name": "f", "arguments": {}, "id": 3}', "needs exactly"),
    ('{"name": 3, "arguments": {}}', '"name" must be a string'),
    ('{"name": "f", "arguments": "x"}', '"arguments" an object'),
    ('{"name": "f", "arguments": null}', '"arguments" an object'),
])
def test_malformed_bodies_say_why(body, reason):
    (found,) = parse_hermes(call(body))
    assert isinstance(found, MalformedCall) and reason in found.reason


@pytest.mark.parametrize(("text", "expected"), [
    ("<tool_call>" + GOOD, ["is not closed"]),
    ("<tool_call>", ["is not closed"]),
    (GOOD + "</tool_call>", ["</tool_call> without <tool_call>"]),
    ("<tool_call>" + call(GOOD), ["is not closed", F]),
    (call(GOOD) + "<tool_call>{", [F, "is not closed"]),
    (call("x") + call(GOOD) + call("y"), ["not JSON", F, "not JSON"]),
])
def test_broken_tags_are_reported_in_order(text, expected):
    found = parse_hermes(text)
    assert len(found) == len(expected)
    for one, wanted in zip(found, expected, strict=True):
        assert one == wanted if isinstance(wanted, ToolCall) else wanted in one.reason


def test_format_and_parse_are_inverse():
    arguments = {"a": "\u4e2d \"q\" \\ \n</b>", "n": [1, 2.5, None, {"k": False}]}
    assert parse_hermes(format_hermes("tool", arguments) * 2) == [ToolCall("tool", arguments)] * 2
