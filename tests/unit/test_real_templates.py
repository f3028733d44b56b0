"""Context identity over the chat templates of real models: what is recorded is what the engine saw, token for token."""

import json
import re

import pytest
from families import FAMILIES, Desk, desk, family_chat, small_tokenizer
from worlds import run, settings

from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import Observation
from rtpo_ray.episodes.contexts import Append, ChatTemplate, Template, build_context
from rtpo_ray.episodes.episode import Episode
from rtpo_ray.episodes.toolcalls import ToolCall
from rtpo_ray.types import Task, context_hash, derive_seed

MODES = ["append", "template", "window", "summary", "strip"]
SEED = 11


def played(name, mode, replies, **changes):
    """An episode of `replies`, one function (template, context) -> token ids a turn: (rollout, engine, a maker of fresh episodes)."""
    template = family_chat(name)
    turns = {derive_seed(SEED, k): reply for k, reply in enumerate(replies)}
    summaries = {derive_seed(SEED, k, "summary"): [*template.encode(f"told {k}"), template.stop_ids[0]] for k in range(len(replies))}

    def reply(context, sampling):
        return turns[sampling.seed](template, context) if sampling.seed in turns else summaries[sampling.seed]

    context, thoughts = ("template", "strip") if mode == "strip" else (mode, "template")
    chosen = settings(**{"max_turns": len(replies), "context": context, "thoughts": thoughts, "window": 2, "max_response_tokens": 400,
                         "max_model_len": 9000, **changes})
    engine = ScriptedEngine(reply, max_model_len=9000)

    def fresh():
        return Episode(lambda: desk(template), template, chosen)

    trunk = fresh()
    trunk.reset(Task(task_id="t", seed=3))
    return run(trunk, engine, seed=SEED, keep_boundaries=True), engine, fresh


def check_identity(name, mode, replies, every=1, **changes):
    """Every recorded context is what the engine was given, and `every` so many boundaries one continues as the trunk did. Returns the
    action turns."""
    rollout, engine, fresh = played(name, mode, replies, **changes)
    assert rollout.failure == "" and len(rollout.turns) == len(engine.requests)
    for turn, (seen, _) in zip(rollout.turns, engine.requests, strict=True):
        assert turn.context_ids == seen and turn.context_hash == context_hash(seen)
    actions = [turn for turn in rollout.turns if turn.kind == "action"]
    assert [boundary.context_hash for boundary in rollout.boundaries] == [turn.context_hash for turn in actions]
    for boundary in rollout.boundaries[::-every]:
        sibling = fresh()
        sibling.restore(boundary)
        assert context_hash(sibling.context()) == boundary.context_hash
        again = run(sibling, engine, seed=SEED)
        assert again.turns == tuple(turn for turn in rollout.turns if turn.turn >= boundary.turn)
    if mode == "append":
        for before, after in zip(actions, actions[1:], strict=False):
            grown = before.context_ids + before.response_ids
            assert after.context_ids[: len(grown)] == grown and len(after.context_ids) > len(grown)
    return actions


def thought(template, context, thinking):
    """What a response begins with, as the family thinks: nothing more where the context has opened the thought."""
    if template.calls.name == "harmony":
        return "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if thinking else ""
    if re.search(r"<think>\s*$", template.tokenizer.decode(context[-8:])):
        return "hm\n</think>\n\n"
    return "<think>\nhm\n</think>\n\n" if thinking else ""


def says(text, thinking=False, stop=0):
    """A response of this text; stop: index of the token that ends it, None where it is cut."""
    def reply(template, context):
        ids = template.encode(thought(template, context, thinking) + text)
        return ids if stop is None else [*ids, template.stop_ids[stop]]
    return reply


def calls(*made, thinking=False, bytewise=False, stop=0):
    """A response with these calls; bytewise: in token ids that encoding its text would not give."""
    def reply(template, context):
        some = made[:1] if template.calls.name == "harmony" else made  # a call ends its responses
        text = thought(template, context, thinking) + template.calls.format([ToolCall(*call) for call in some]).removesuffix("<|call|>")
        ids = template.encode(text)
        if bytewise:
            ids = singly(template, ids)
            assert ids != template.encode(text) and template.tokenizer.decode(ids) == text
        return [*ids, template.stop_ids[1 if template.calls.name == "harmony" else stop]]
    return reply


def singly(template, ids):
    """The same text with every merged token taken apart into its bytes."""
    special = set(template.tokenizer.all_special_ids) | set(template.tokenizer.get_added_vocab().values())
    words = [[one] if one in special else list(template.tokenizer.convert_ids_to_tokens(one)) for one in ids]
    return [part if isinstance(part, int) else template.tokenizer.convert_tokens_to_ids(part) for word in words for part in word]


def final(text, thinking=False):
    def reply(template, context):
        ended = f"<|channel|>final<|message|>{text}" if template.calls.name == "harmony" else text
        return says(ended, thinking)(template, context)
    return reply


TRICKY = {"text": "a </tool_call> \"q\" \\ \n{'n': [1]} \u00e9\u4e2d\U0001f600 </div>"}


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_identity_over_calls_thoughts_and_token_ids(name, mode, thinking):
    replies = [calls(("add", {"number": 2}), ("note", TRICKY), thinking=thinking), calls(("add", {"number": 4}), thinking=thinking, bytewise=True),
               says("no call at all", thinking), final("done", thinking)]
    turns = check_identity(name, mode, replies)
    parallel = family_chat(name).calls.name != "harmony"
    assert [turn.tool_calls for turn in turns] == [2 if parallel else 1, 1, 0, 0]
    assert turns[0].observation == ("total 5\n" + f"noted {TRICKY['text']}" if parallel else "total 5") and turns[1].observation == "total 9"
    assert sum(turn.malformed_calls for turn in turns) == 0 and turns[-1].reward == 1.0


BROKEN = ["", " ", "<think>only", "<think>a<think>b</think>c", "</think>", '<tool_call>{"name": "add", "arguments": {"number": 1,}}</tool_call>',
          '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<tool_call>{'name': 'add', 'arguments': {'number': 1}}</tool_call>",
          '```json\n{"name": "add", "parameters": {"number": 1}}\n```', "[TOOL_CALLS][", '<|python_tag|>print(1)', "[add(number=1]",
          "<|channel|>commentary to=functions.add<|message|>{", "<function=add><parameter=number>1</parameter>", "\n\n two words \n"]


@pytest.mark.parametrize("mode", ["append", "template", "summary"])
@pytest.mark.parametrize("name", FAMILIES)
def test_identity_over_broken_responses(name, mode):
    """Closed by a token and, every other one, cut without; the last is cut by the limit of the response in the middle of a call."""
    replies = [says(text, stop=None if number % 2 else -1) for number, text in enumerate(BROKEN)]
    replies += [calls(("note", {"text": "x" * 900})), final("done")]
    turns = check_identity(name, mode, replies, every=8, max_response_tokens=300)
    assert len(turns) == len(replies) and turns[-2].finish_reason == "length" and len(turns[-2].response_ids) == 300
    assert turns[-2].tool_calls == turns[-2].malformed_calls == 1


SAME = [name for name in FAMILIES if name not in ("deepseekv3", "qwen3-nothink")]


def canonical(template, context, k):
    """A response in exactly the spaces that the template would write it in."""
    opened = thought(template, context, False)
    number = {"name": "add", "arguments": {"number": k}}
    texts = {"harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
                        f'{{"number": {k}}}',
             "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {{"number": {k}}}, "id": "abcdefgh{k}"}}]',
             "glm": f"\n<think>hm</think>\n{template.calls.format([ToolCall(**number)])}"}
    thinks = "enable_thinking" in template.tokenizer.chat_template and not template.tokenizer.decode(context[-8:]).endswith("</think>\n\n")
    starts = opened or ("<think>\nhm\n</think>\n\n" if thinks else "")
    return texts.get(template.calls.name, starts + template.calls.format([ToolCall(**number)]))


def by_hand(template, text, observation):
    """The turn as messages, written down without the code under test."""
    if template.calls.name == "mistral":
        call = json.loads(text.removeprefix("[TOOL_CALLS]"))[0]
        made = [{"id": call["id"], "type": "function", "function": {"name": "add", "arguments": call["arguments"]}}]
        return [{"role": "assistant", "content": "", "tool_calls": made}, {"role": "tool", "content": observation, "tool_call_id": call["id"]}]
    if template.calls.name != "harmony":
        role = "user" if any(token in template.tokenizer.get_added_vocab() for token in ("<start_of_turn>", "<|user|>")) and \
            "<|observation|>" not in template.tokenizer.get_added_vocab() else "tool"
        return [{"role": "assistant", "content": text}, {"role": role, "content": observation}]
    (number,) = re.findall(r'\{"number": (\d+)\}', text)
    call = {"type": "function", "function": {"name": "add", "arguments": {"number": int(number)}}}
    return [{"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]}, {"role": "tool", "content": observation}]


def rendered(name, mode):
    """Three turns in the family's own writing: [(context ids, messages so far, tools)] a turn."""
    replies = [lambda template, context, k=k: [*template.encode(canonical(template, context, k)), template.stop_ids[own_stop(template)]]
               for k in range(3)]
    turns = check_identity(name, mode, replies)
    template = family_chat(name)
    messages, tools = template.opening(Desk.system, desk(template).tools(), Observation("question"))
    shown = []
    for turn in turns:
        shown.append((list(turn.context_ids), list(messages), tools))
        prefix = "<think>" if re.search(r"<think>\s*$", template.tokenizer.decode(turn.context_ids[-8:])) else ""
        messages += by_hand(template, prefix + template.tokenizer.decode(turn.response_ids[:-1]), turn.observation)
    assert [turn.observation for turn in turns] == ["total 3", "total 4", "total 6"]
    return template, shown


def own_stop(template):
    """Which stop token ends a call in the template itself."""
    return {"harmony": 1, "glm": 1}.get(template.calls.name, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_context_template_is_what_the_tokenizer_renders(name):
    template, shown = rendered(name, "template")
    for ids, messages, tools in shown:
        assert ids == template.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, return_dict=False,
                                                             strftime_now=lambda form: "2025-01-01", **FAMILIES[name].args)


@pytest.mark.parametrize("name", SAME)
def test_context_append_decodes_to_what_the_template_renders(name):
    template, shown = rendered(name, "append")
    for ids, messages, tools in shown:
        assert template.tokenizer.decode(ids) == template.render(messages, tools, prompt=True)


def test_where_append_differs_from_the_template():
    """Qwen3 without thinking: the template takes the empty thought, which the prompt wrote, out of earlier turns. DeepSeek-V3: it takes every
    thought out, and opens the list of results once an episode only. Append keeps what the model saw."""
    template, shown = rendered("qwen3-nothink", "append")
    for ids, messages, tools in shown:
        kept, written = template.tokenizer.decode(ids), template.render(messages, tools, prompt=True)
        empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert kept.count(empty) == len(messages) // 2 and written.count(empty) == 1
        assert kept.replace("<think>\n\n</think>\n\n", "") == written.replace("<think>\n\n</think>\n\n", "")
    template, shown = rendered("deepseekv3", "append")
    ids, messages, tools = shown[2]
    kept, written = template.tokenizer.decode(ids), template.render(messages, tools, prompt=True)
    assert (kept.count("hm"), written.count("hm")) == (1, 0)
    assert (kept.count("<｜tool▁outputs▁begin｜>"), written.count("<｜tool▁outputs▁begin｜>")) == (2, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_user_message_follows_or_is_refused_with_the_field_to_set(name):
    template = family_chat(name)
    builder = Append(template)
    builder.start("", [], Observation("question"))
    before = builder.context()
    response = [*template.encode("hello"), template.stop_ids[0]]
    if FAMILIES[name].user_ok:
        builder.extend(response, Observation("second", "user"))
        assert builder.context()[: len(before) + len(response)] == before + response
        assert "second" in template.tokenizer.decode(builder.context()[len(before) + len(response):])
    else:
        with pytest.raises(ValueError, match=r"rewrites an earlier message when a 'user' message follows.*environment\.context=template"):
            builder.extend(response, Observation("second", "user"))
        assert builder.context() == before


@pytest.mark.parametrize("name", FAMILIES)
def test_format_and_stop_tokens_are_found(name):
    template, family = family_chat(name), FAMILIES[name]
    assert template.calls.name == family.calls
    assert {template.tokenizer.convert_ids_to_tokens(one) for one in template.stop_ids} == set(family.stops)
    for one in template.stop_ids:
        assert template.response_text([*template.encode("hello"), one]) == "hello"
    assert template.opens_thoughts == (name in ("qwen3.5-think", "deepseekv3"))


def test_sampling_stops_on_every_stop_token():
    _, engine, _ = played("llama3.1", "append", [says("hello", stop=1), says("hello", stop=2), final("done")])
    assert {sampling.stop_token_ids for _, sampling in engine.requests} == {family_chat("llama3.1").stop_ids}


@pytest.mark.parametrize(("name", "end", "role", "between"), [
    ("llama3.1", "<|eom_id|>", "tool", "<|eom_id|><|start_header_id|>ipython"),
    ("llama3.1", "<|end_of_text|>", "user", "<|end_of_text|><|start_header_id|>user"),
    ("phi3", "<|endoftext|>", "user", "<|endoftext|>\n<|user|>"),
    ("gptoss", "<|return|>", "user", "<|return|><|start|>user<|message|>"),
    ("glm4moe", "<|observation|>", "tool", "<|observation|>\n<tool_response>"),
    ("glm4moe", "<|user|>", "tool", "<|user|><|observation|>\n<tool_response>"),
    ("glm4moe", "<|endoftext|>", "user", "<|endoftext|><|user|>\nnext"),
])
def test_append_goes_on_after_whichever_token_ended_the_response(name, end, role, between):
    template = family_chat(name)
    builder = Append(template)
    builder.start("", [], Observation("question"))
    builder.extend([*template.encode("hello"), template.tokenizer.convert_tokens_to_ids(end)], Observation("next", role))
    assert f"hello{between}" in template.tokenizer.decode(builder.context())


def test_a_template_without_a_token_that_ends_a_message_is_refused():
    tokenizer = small_tokenizer(("<|im_start|>",), "<|im_start|>", template="{% for message in messages %}{{ message.content }}\n{% endfor %}")
    with pytest.raises(ValueError, match=r"ends an assistant message with .*no special token of the tokenizer \(eos_token is '<\|im_start\|>'\)"):
        ChatTemplate(tokenizer)


def test_gpt_oss_shows_a_result_as_the_called_tools_and_an_error_as_the_users():
    turns = check_identity("gptoss", "template", [
        calls(("add", {"number": 2}), thinking=True), says("<|channel|>commentary to=functions.add<|message|>{x", stop=1), final("done")])
    shown = family_chat("gptoss").tokenizer.decode(turns[-1].context_ids)
    assert '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"total 5"<|end|>' in shown
    assert "<|start|>user<|message|>error: the argument object of the tool call is not JSON" in shown
    assert "<|channel|>analysis<|message|>hm" not in shown  # the template takes thoughts out once something was said


@pytest.mark.parametrize("name", ["llama3", "gemma3", "phi3", "deepseekv3"])
def test_tools_can_be_described_in_the_system_message(name):
    def first(tools_in):
        template = family_chat(name, tools_in=tools_in)
        builder = Template(template)
        builder.start("be brief", desk(template).tools(), Observation("question"))
        return template, template.tokenizer.decode(builder.context())

    template, told = first("system")
    assert '{"name": "add", "description": "Add a number."' in told and '"name": "note"' in told
    assert "be brief\n\nYou can call these tools:\n{" in told and template.calls.format([ToolCall("NAME", {"ARGUMENT": "VALUE"})]) in told
    assert "Add a number" not in first("template")[1]


def test_arguments_of_the_template_reach_every_rendering():
    on, off = family_chat("qwen3"), family_chat("qwen3-nothink")
    for template, empty in ((on, 0), (off, 1)):
        builder = Append(template)
        builder.start("", [], Observation("question"))
        assert template.tokenizer.decode(builder.context()).count("<think>\n\n</think>") == empty
        builder.extend([*template.encode("hello"), template.stop_ids[0]], Observation("next", "tool"))
        assert template.tokenizer.decode(builder.context()).count("<think>\n\n</think>") == 2 * empty


def test_a_template_that_writes_the_date_writes_the_same_on_every_day():
    builder = Append(family_chat("gptoss"))
    builder.start("", [], Observation("question"))
    assert "Current date: 2025-01-01\n" in family_chat("gptoss").tokenizer.decode(builder.context())


@pytest.mark.parametrize("mode", ["template", "window", "summary"])
def test_thoughts_are_stripped_from_earlier_turns_and_calls_are_kept(mode):
    template = family_chat("phi3")
    for thoughts, kept in (("template", True), ("strip", False)):
        builder = build_context(mode, template, 2, thoughts)
        builder.start("", [], Observation("question"))
        builder.extend(calls(("add", {"number": 2}), thinking=True)(template, [0]), Observation("total 5", "tool"))
        shown = template.tokenizer.decode(builder.summary_request() or builder.context())
        assert ("hm" in shown) == kept and '{"name": "add", "arguments": {"number": 2}}' in shown


@pytest.mark.parametrize("name", ["phi3", "gptoss"])
def test_an_episode_strips_thoughts_when_it_is_set_to(name):
    for mode, kept in (("template", True), ("strip", False)):
        turns = check_identity(name, mode, [calls(("add", {"number": 2}), thinking=True), final("done")])
        assert ("hm" in family_chat(name).tokenizer.decode(turns[1].context_ids)) == kept


def test_a_thought_of_the_prompt_that_is_cut_calls_nothing_and_is_stripped():
    """Qwen3.5: the prompt opens the thought, so a response that ends inside it has no mark of a thought at all."""
    call = family_chat("qwen3.5-think").calls.format([ToolCall("add", {"number": 1})])
    for mode, kept in (("template", True), ("strip", False)):
        turns = check_identity("qwen3.5-think", mode, [
            lambda template, context: template.encode(f"maybe {call}"), calls(("add", {"number": 2})), final("done")])
        assert [turn.tool_calls for turn in turns] == [0, 1, 0] and [turn.observation for turn in turns] == ["go on 1", "total 5", ""]
        assert ("maybe" in family_chat("qwen3.5-think").tokenizer.decode(turns[1].context_ids)) == kept


def test_a_response_that_begins_inside_the_thought_of_the_prompt_is_read_as_one():
    template = family_chat("qwen3.5-think")
    builder = Append(template)
    builder.start("", [], Observation("question"))
    call = template.calls.format([ToolCall("add", {"number": 1})])
    for text, total, answers in ((f"maybe {call}", 0, [""]), (f"maybe</think>\n\n{call}", 1, []), (f"maybe {call}</think>\n\n7", 0, ["7"])):
        seen = template.response_text([*template.encode(text), template.stop_ids[0]], builder.context())
        assert seen == f"<think>{text}"
        world = desk(template)
        world.reset(0)
        world.step(seen)
        assert (world.total, world.answers) == (total, answers)
