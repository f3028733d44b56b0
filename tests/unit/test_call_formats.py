"""Tool calls as models of every family write and miswrite them, and vLLM's own parsers as witnesses for what is well formed."""

import json
import re
import time

import pytest
from families import DEEPSEEK, small_tokenizer

from rtpo_ray.environments.base import Observation, Step, ToolEnvironment, tool
from rtpo_ray.episodes.toolcalls import FORMATS, MalformedCall, Reading, ToolCall, describe_tools, recognise

SCHEMAS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {
    "x": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}, "b": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}}}]
F, G = ToolCall("f", {"x": 1}), ToolCall("g", {})
T = ToolCall("f", {"s": 'a "q" \\ \u00e9\u4e2d </tool_call> <think> {"k": [1]}'})
SAID = json.dumps(T.arguments, ensure_ascii=False)  # T's arguments as JSON with the characters as they are
DS = {"begin": "<｜tool▁call▁begin｜>", "end": "<｜tool▁call▁end｜>", "sep": "<｜tool▁sep｜>",
      "all": "<｜tool▁calls▁begin｜>", "done": "<｜tool▁calls▁end｜>"}


def hermes(body):
    return f"<tool_call>{body}</tool_call>"


def deepseek(*bodies):
    return DS["all"] + "\n".join(f"{DS['begin']}function{DS['sep']}{name}\n```json\n{body}\n```{DS['end']}" for name, body in bodies) + DS["done"]


def glm(name, *pairs):
    return f"<tool_call>{name}\n" + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs) + "</tool_call>"


def coder(name, *pairs):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def harmony(name, body, end="<|call|>"):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}{end}"


FJ = '{"name": "f", "arguments": {"x": 1}}'
FP = '{"name": "f", "parameters": {"x": 1}}'
GA = '{"arguments": {}, "name": "g"}'
GP = '{"name": "g", "parameters": {}}'

# (response, calls in order - a malformed one by what its reason contains -, text that is left where it matters)
CORPUS = {
    "hermes": [
        (hermes(FJ), [F], None),
        (f"I see.\n{hermes(FJ)}\n{hermes(GA)} now", [F, G], None),
        (hermes(f'\n{{"name": "f", "arguments": {SAID}}}\n'), [T], None),
        (f"```\n{hermes(FJ)}\n```", [F], None),
        (hermes('{"name": "f", "arguments": {"l": [{"a": {"b": null}}, [true, 2.5]], "b": false}}'),
         [ToolCall("f", {"l": [{"a": {"b": None}}, [True, 2.5]], "b": False})], None),
        (f"<think>\nno {hermes(FJ)}\n</think>\n\n{hermes(FJ)}", [F], None),
        (f"<think>{hermes(FJ)}</think> 42", [], "42"),
        (f"maybe {hermes(FJ)} hm</think>\n42", [], "42"),  # the prompt had opened the thought
        ("<think>a<think>b</think>c", [], "c"),
        ("<think>a</think><think>b</think>c", [], "c"),
        ("<think>a</think>b</think>c", [], "c"),
        (f"<think>\n{hermes(FJ)}", [], ""),
        ("<think>\nonly", [], ""),
        ("<think></think>", [], ""),
        ("", [], ""),
        (" 42 \n", [], " 42 \n"),
        (FJ, [], FJ),
        ("a tool_call tag", [], None),
        (f"{hermes(FJ)}<think>{hermes('{}')}</think>", [F], None),
        (hermes(f"```json\n{FJ}\n```"), ["not JSON"], None),
        (hermes('{"name": "f", "arguments": {"x": 1,}}'), ["not JSON"], None),
        (hermes("{'name': 'f', 'arguments': {'x': 1}}"), ["not JSON"], None),
        (hermes('{"name": "f", "arguments": {"s": "a\nb"}}'), ["not JSON: Invalid control character"], None),
        (hermes('{"name": ["f"], "arguments": {}}'), ['"name" must be a string'], None),
        (hermes('{"name": "f", "arguments": "{}"}'), ["an object"], None),
        (hermes(f"[{FJ}, {FJ}]"), ["exactly the keys"], None),
        (f"{hermes(FJ)}<tool_call>{FJ[:20]}", [F, "not closed by </tool_call>"], None),
        (f"<tool_call>{FJ}", ["not closed"], None),
        (f"<tool_call>{FJ} and so on", ["not closed"], None),
        (hermes(f"{FJ} x"), ["Extra data at character 37"], None),
        (f"{FJ}</tool_call>", ["</tool_call> without <tool_call>"], None),
        (hermes("[" * 50_000), ["nested too deeply"], None),
    ],
    "llama3": [
        (FP, [F], None),
        (f"<|python_tag|>{FP}", [F], None),
        (f"{FP}; {GP}", [F, G], None),
        (f"{FP}\n{GP}", [F, G], None),
        (f"<|python_tag|>{FP}<|python_tag|>{GP}", [F, G], None),
        (f"Let me see: {FP} there", [F], None),
        (f"```json\n{FP}\n```", [F], None),
        ('{"type": "function", "name": "f", "parameters": {"x": 1}}', [F], None),
        ('{"name": "f", "arguments": {"x": 1}}', [F], None),
        (f'{{"name": "f", "parameters": {SAID}}}', [T], None),
        ('{\n  "name": "f",\n  "parameters": {\n    "x": 1\n  }\n}', [F], None),
        (f"<think>{FP}</think>42", [], "42"),
        ('{"total": 42}', [], '{"total": 42}'),
        ("the set {1, 2} and {x}", [], "the set {1, 2} and {x}"),
        ("{" * 3000, [], None),
        ('{"name": "f", "parameters": {"x": 1,}}', ["not JSON"], None),
        (f'{{"name": "f", "parameters": {{"x": }}}}; {GP}', ["not JSON", G], None),
        ("{'name': 'f', 'parameters': {'x': 1}}", ["not JSON"], None),
        ('{"name": "f"}', ['exactly the keys "name" and "parameters"'], None),
        ('{"name": 3, "parameters": {}}', ['"name" must be a string'], None),
        ('{"name": "f", "parameters": "x"}', ["an object"], None),
        (FP[:-6], ["not JSON"], None),
        ("<|python_tag|>print(1)", ["must be followed by"], None),
        ("<|python_tag|>", ["must be followed by"], None),
        ('<|python_tag|>{"a": 1}', ["exactly the keys"], None),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{FJ}]", [F], None),
        (f'[TOOL_CALLS] [{FJ}, {{"name": "g", "arguments": {{}}, "id": "abcdefghi"}}]', [F, G], None),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}', [F], None),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', [F, G], None),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', [F], None),
        ('[TOOL_CALLS]f{"x": 1}', [F], None),
        (f"So: [TOOL_CALLS]f[ARGS]{SAID}", [T], None),
        (f'[TOOL_CALLS][{{"name": "f", "arguments": {SAID}}}]', [T], None),
        (f"[TOOL_CALLS]{FJ}", [F], None),
        (f"[{FJ}]", [], None),
        ("[1, 2]", [], "[1, 2]"),
        (f"[TOOL_CALLS][{FJ}", ["not JSON"], None),
        ("[TOOL_CALLS]", ["not JSON"], None),
        ("[TOOL_CALLS][]", ["must be followed by a list"], None),
        ('[TOOL_CALLS][{"name": "f"}]', ["exactly the keys"], None),
        (f"[TOOL_CALLS][{FJ}, 3]", [F, "exactly the keys"], None),
        ('[TOOL_CALLS]f[ARGS]{"x": 1,}', ["not JSON"], None),
        ('[TOOL_CALLS]f[ARGS]{"x": [TOOL_CALLS]g[ARGS]{}', ["not JSON", G], None),
        ("[TOOL_CALLS][{'name': 'f', 'arguments': {}}]", ["not JSON"], None),
        ("[TOOL_CALLS]f(1)", ["not JSON"], None),
    ],
    "harmony": [
        (harmony("f", '{"x": 1}'), [F], None),
        (harmony("f", '{"x": 1}', end=""), [F], None),  # its end is the token that ended the response
        (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', [F], None),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + harmony("f", SAID), [T], None),
        (harmony("f", '{"x": 1}') + "<|start|>assistant" + harmony("g", "{}"), [F, G], None),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>", [], "42"),
        ("<|channel|>final<|message|>42", [], "42"),
        ("42", [], "42"),
        ("", [], ""),
        ("<|channel|>analysis<|message|>only", [], ""),
        ("<|channel|>analysis", [], ""),
        ('<|channel|>analysis<|message|>I call to=functions.f {"x": 1}<|end|>', [], ""),
        ("<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant" + harmony("g", "{}"), [G], None),
        (harmony("f", '{"x": 1'), ["not JSON"], None),
        (harmony("f", '{"x": 1,}'), ["not JSON"], None),
        (harmony("f", "[1]"), ["an object"], None),
        (harmony("f", ""), ["not JSON"], None),
        ("<|channel|>commentary to=functions.f <|constrain|>json", ["no <|message|>"], None),
        (harmony("g", "{}") + "<|start|>assistant<|channel|>commentary to=functions.f", [G, "no <|message|>"], None),
        ("<|channel|>commentary to=python<|message|>1+1<|call|>", ["no recipient 'python'"], None),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", ["no recipient 'functions.'"], None),
    ],
    "deepseek": [
        (deepseek(("f", '{"x": 1}')), [F], None),
        ("Well.\n" + deepseek(("f", '{"x": 1}'), ("g", "{}")), [F, G], None),
        (deepseek(("f", SAID)), [T], None),
        ("hm</think>\n" + deepseek(("f", '{"x": 1}')), [F], None),
        (f"<think>{deepseek(('g', '{}'))}</think>42", [], "42"),
        (f"{DS['all']}{DS['begin']}f{DS['sep']}{{\"x\": 1}}{DS['end']}{DS['done']}", [F], None),  # V3.1
        (deepseek(("f", '{"x": 1,}'), ("g", "{}")), ["not JSON", G], None),
        (deepseek(("f", "{'x': 1}")), ["not JSON"], None),
        (deepseek(("f", "[1]")), ["an object"], None),
        (deepseek(("f", '{"x": 1}'))[:-len(DS["end"] + DS["done"])], ["not closed"], None),
        (DS["all"], ["without a call"], None),
        (f"{DS['all']}{DS['begin']}f{{}}{DS['end']}", ["must be function"], None),
        ('function f {"x": 1}', [], None),
    ],
    "glm": [
        (glm("f", ("x", 1)), [F], None),
        (glm("f", ("x", 1)) + "\n" + glm("g"), [F, G], None),
        ("<tool_call>g</tool_call>", [G], None),
        ("<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", [F], None),
        (glm("f", ("s", "7"), ("x", "7")), [ToolCall("f", {"s": "7", "x": 7})], None),
        (glm("f", ("s", 'a "q" \\ \u00e9 {"k": [1]}\n<think>')), [ToolCall("f", {"s": 'a "q" \\ \u00e9 {"k": [1]}\n<think>'})], None),
        (glm("f", ("l", '[1, {"a": 2}]'), ("b", "true")), [ToolCall("f", {"l": [1, {"a": 2}], "b": True})], None),
        (f"\n<think>{glm('g')}</think>\n42", [], None),
        (f"<think>hm</think>\n{glm('f', ('x', 1))}", [F], None),
        (glm("f", ("x", 1))[:-12], ["not closed by </tool_call>"], None),
        ("<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>", ["must look like"], None),
        (hermes(FJ), ["must look like"], None),
        ("<tool_call></tool_call>" + glm("g"), ["must look like", G], None),
    ],
    "qwen3_coder": [
        (coder("f", ("x", 1)), [F], None),
        ("First.\n\n" + coder("f", ("x", 1)) + "\n" + coder("g"), [F, G], None),
        (coder("f", ("s", "7"), ("x", "7")), [ToolCall("f", {"s": "7", "x": 7})], None),
        (coder("f", ("s", 'two\nlines "q" </tool_call> <think>')), [ToolCall("f", {"s": 'two\nlines "q" </tool_call> <think>'})], None),
        (coder("f", ("l", '[1, {"a": 2}]'), ("b", "true")), [ToolCall("f", {"l": [1, {"a": 2}], "b": True})], None),
        ("<function=f>\n<parameter=x>\n1\n</parameter>\n</function>", [F], None),
        (f"<think>\n{coder('g')}\n</think>\n\n42", [], "42"),
        (coder("f", ("x", "one")), [ToolCall("f", {"x": "one"})], None),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n", ["not closed by </function>"], None),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1", ["not closed by </function>"], None),
        ("<tool_call>\n<function=f>\nx = 1\n</function>\n</tool_call>", ["must look like"], None),
        (hermes(FJ), ["not closed by </function>"], None),
        ("</function>", ["without <function=NAME>"], None),
    ],
    "pythonic": [
        ("[f(x=1)]", [F], None),
        ("[f(x=1), g()]", [F, G], None),
        ('[f(s="a \\"q\\" ]) \u00e9", l=[1, {"a": None}], b=True)]',
         [ToolCall("f", {"s": 'a "q" ]) \u00e9', "l": [1, {"a": None}], "b": True})], None),
        ("[f(b=true, s=null)]", [ToolCall("f", {"b": True, "s": None})], None),
        ("[f(x=-1)]", [ToolCall("f", {"x": -1})], None),
        ("So <|tool_call_start|>[f(x=1)]<|tool_call_end|> there", [F], None),
        ("<think>[g()]</think>[f(x=1)]", [F], None),
        ("[1, 2]", [], "[1, 2]"),
        ("f(x=1)", [], None),
        ("[f(1)]", ["every argument needs its name"], None),
        ("[f(x=1", ["not a Python list"], None),
        ("[f(x=y)]", ["no plain value"], None),
        ("[f(x=1), 3]", [F, "is not a call"], None),
        ("[f(x=1)] and so on", ["not a Python list"], None),
        ("<|tool_call_start|>[f(x=1)]", ["not closed by <|tool_call_end|>"], None),
        ("<|tool_call_start|>f(x=1)<|tool_call_end|>", ["must be a list"], None),
        ("<|tool_call_start|>[]<|tool_call_end|>", ["must be a list"], None),
        ("[f(x=1)]<|tool_call_end|>", ["not a Python list"], None),
    ],
}
CASES = [(spoken, *case) for spoken, cases in CORPUS.items() for case in cases]
IDS = [f"{spoken}-{number}" for spoken, cases in CORPUS.items() for number in range(len(cases))]


@pytest.mark.parametrize(("spoken", "text", "expected", "left"), CASES, ids=IDS)
def test_every_attempt_is_read_or_answered(spoken, text, expected, left):
    reading = FORMATS[spoken].read(text, lambda: SCHEMAS)
    assert len(reading.calls) == len(expected), reading.calls
    for one, wanted in zip(reading.calls, expected, strict=True):
        assert one == wanted if isinstance(wanted, ToolCall) else isinstance(one, MalformedCall) and wanted in one.reason, one
    if left is not None:
        assert reading.text == left
    assert FORMATS[spoken].strip_thought(text) == reading.text


HARD = ToolCall("f", {"s": 'a \u4e2d "q" \\ \n</b> {"k": 1}', "x": -3, "l": [1, 2.5, None, {"k": [False]}], "b": True})


@pytest.mark.parametrize("spoken", FORMATS)
def test_reading_what_was_formatted_gives_the_same_calls(spoken):
    for made in ([HARD], [F, G], [G, HARD, HARD]):
        reading = FORMATS[spoken].read(FORMATS[spoken].format(made), lambda: SCHEMAS)
        assert reading.calls == made
        assert FORMATS[spoken].read(f"<think>x</think>{FORMATS[spoken].format(made)}", lambda: SCHEMAS).calls == made


@pytest.mark.parametrize("spoken", FORMATS)
@pytest.mark.parametrize("unit", ["{", '{"a":', "[f(", "<tool_call>", "<think>", "<|python_tag|>", "[TOOL_CALLS]", "<function=f>",
                                  "<|channel|>", DS["begin"]])
def test_reading_takes_no_longer_than_the_text_is_long(spoken, unit):
    began = time.process_time()
    FORMATS[spoken].read(unit * 4000, lambda: SCHEMAS)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(("text", "spoken"), [
    ("{{ '<tool_call>' }}", "hermes"), ("<|im_start|>", "hermes"), ("", "hermes"), ("None", "hermes"), ("<|channel|>analysis", "harmony"),
    ("[TOOL_CALLS]", "mistral"), ("<tool_call>{name}<arg_key>", "glm"), ("<tool_call><function=x>", "qwen3_coder"), ("role == 'ipython'", "llama3"),
    (DS["begin"], "deepseek"), ("<|tool_list_start|>", "pythonic")])
def test_a_format_is_recognised_by_what_the_chat_template_writes(text, spoken):
    assert recognise(text) == spoken


@pytest.mark.parametrize("spoken", FORMATS)
def test_tools_are_described_with_their_schemas_and_a_call_that_can_be_read(spoken):
    told = describe_tools(FORMATS[spoken], SCHEMAS)
    assert [json.loads(line) for line in told.splitlines() if line.startswith(('{"name": "f"', '{"name": "g"'))] == [
        schema["function"] for schema in SCHEMAS]
    example = told.partition("as often as needed:\n")[2].rpartition("\n")[0]
    assert FORMATS[spoken].read(example).calls == [ToolCall("NAME", {"ARGUMENT": "VALUE"})]


class Till(ToolEnvironment):
    instant = True

    def reset(self, seed):
        return Observation("?")

    @tool
    def pay(self, price: int, to: str) -> str:
        """Pay.

        Args:
            price: how much
            to: whom
        """
        return f"paid {price} to {to}"

    def answer(self, text):
        return Step(reward=float(text == "42"), terminated=True)


@pytest.mark.parametrize("spoken", FORMATS)
def test_environments_read_calls_and_answers_in_their_format(spoken):
    till = Till()
    till.calls = spoken
    step = till.step(FORMATS[spoken].format([ToolCall("pay", {"price": 3, "to": "7"})]))
    assert (step.observation, step.info) == (Observation("paid 3 to 7", "tool"), {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 0})
    answer, cut = "<think>7</think>\n 42\n", "<think>42"
    if spoken == "harmony":
        answer, cut = "<|channel|>analysis<|message|>7<|end|><|start|>assistant<|channel|>final<|message|> 42", "<|channel|>analysis<|message|>42"
    assert till.step(answer) == Step(reward=1.0, terminated=True)
    assert till.step(cut) == Step(reward=0.0, terminated=True)  # a thought without an end says nothing


VLLM = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral", "qwen3_coder": "qwen3_coder", "glm": "glm45", "deepseek": "deepseek_v3",
        "pythonic": "pythonic"}
WITNESS_TOKENS = ("<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call_start|>",
                  "<|tool_call_end|>", *DEEPSEEK)
# Well formed, and vLLM's parser does not see it: it looks for the end of a call inside strings, or knows one of two writings only.
UNSEEN = {"hermes-2", "mistral-4", "deepseek-5"}


@pytest.fixture(scope="module")
def witness():
    """vLLM's parser of a format, as a function of a response: the calls that it finds."""
    parsers = pytest.importorskip("vllm.tool_parsers")
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", tools=SCHEMAS)

    def extract(parser, text):
        older = re.search(r"\[TOOL_CALLS\]\s*[\[{]", text)  # vLLM tells the two writings of Mistral apart by the vocabulary
        tokens = WITNESS_TOKENS if older else (*WITNESS_TOKENS, "[ARGS]", "[CALL_ID]")
        made = parsers.ToolParserManager.get_tool_parser(parser)(small_tokenizer(tokens, "<|im_end|>"), request.tools)
        return [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in made.extract_tool_calls(text, request).tool_calls]
    return extract


@pytest.mark.parametrize("spoken", VLLM)
def test_vllm_reads_the_same_calls_where_none_is_malformed(spoken, witness):
    seen = 0
    for number, (text, expected, _) in enumerate(CORPUS[spoken]):
        if not all(isinstance(one, ToolCall) for one in expected):
            continue
        said = FORMATS[spoken].strip_thought(text)  # vLLM leaves thoughts to another parser
        parser = "lfm2" if "<|tool_call_start|>" in said else VLLM[spoken]
        same = witness(parser, said) == expected
        assert same == (f"{spoken}-{number}" not in UNSEEN), (number, said, witness(parser, said))
        seen += same and bool(expected)
    assert seen >= 4


def test_openai_reads_the_same_calls_in_harmony():
    harmony_of = pytest.importorskip("openai_harmony")
    encoding = harmony_of.load_harmony_encoding("HarmonyGptOss")
    seen = 0
    for text, expected, _ in CORPUS["harmony"]:
        if expected and all(isinstance(one, ToolCall) for one in expected):
            messages = encoding.parse_messages_from_completion_tokens(encoding.encode(text, allowed_special="all"), harmony_of.Role.ASSISTANT)
            found = [ToolCall(message.recipient.removeprefix("functions."), json.loads(message.content[0].text))
                     for message in messages if message.recipient]
            assert found == expected, text
            seen += 1
    assert seen == 6


@pytest.mark.parametrize("text", [
    r"We have \[ f(x) = x^2 \] so the answer is \boxed{4}.", r"Then \left[g(x)\right] is 3.", "[f(2)]^2 is 16, so the answer is 16.",
    "As in [Smith (2020)], the answer is 4.", "[f(2)] + [g(3)]"])
def test_mathematics_and_citations_are_no_pythonic_calls(text):
    assert FORMATS["pythonic"].read(text) == Reading([], text)


OPTIONAL = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
    "word": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]}}}}}]


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
def test_texts_that_look_like_numbers_stay_texts_where_only_a_text_fits(name):
    written = FORMATS[name].format([ToolCall("find", {"word": "2024", "count": 3, "either": 7})])
    assert FORMATS[name].read(written, lambda: OPTIONAL).calls == [ToolCall("find", {"word": "2024", "count": 3, "either": 7})]
    written = FORMATS[name].format([ToolCall("find", {"word": None, "count": None, "either": "x"})])
    assert FORMATS[name].read(written, lambda: OPTIONAL).calls == [ToolCall("find", {"word": None, "count": None, "either": "x"})]
