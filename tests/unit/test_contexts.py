"""Tokens in, tokens out: contexts grow by exactly what was sampled, over several chat templates."""

import pytest
from chats import chat
from worlds import Parrot, episode, parrot_engine, run

from rtpo_ray.environments.base import Observation
from rtpo_ray.episodes import contexts
from rtpo_ray.episodes.contexts import SUMMARY_REQUEST, Append, Summary, Template, Window, build_context
from rtpo_ray.types import context_hash

STABLE = ["chatml", "llama", "mistral"]
RESPONSES = ["hello", " two words ", "hello\n\n", "\u00e9\u4e2d\U0001f600", "<tool_call>{}</tool_call>", "<think>\nhm\n</think>\n\nhello"]


def started(builder, family):
    made = builder(chat(family))
    made.start("", [], Observation("question"))
    return made


def bytewise(template, text):
    """Token ids that decode to `text` but are not what `encode` gives."""
    ids = [template.tokenizer.convert_tokens_to_ids(token) for token in "".join(template.tokenizer.tokenize(text))]
    assert template.tokenizer.decode(ids) == text and ids != template.encode(text)
    return ids


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", STABLE)
def test_append_holds_what_was_sampled_and_reads_as_the_template_would(family, role):
    template, messages = chat(family), [{"role": "user", "content": "question"}]
    builder = started(Append, family)
    assert builder.context() == template.encode(template.render(messages, [], prompt=True))
    for number, text in enumerate(RESPONSES):
        before, space = builder.context(), " " if family == "mistral" else ""
        response = [*template.encode(space + text), template.tokenizer.eos_token_id]
        builder.extend(response, Observation(f"word {number}", role))
        after = builder.context()
        assert after[: len(before) + len(response)] == before + response
        assert len(after) > len(before) + len(response)
        messages += [{"role": "assistant", "content": text}, {"role": role, "content": f"word {number}"}]
        trimmed = [{**message, "content": message["content"].strip()} for message in messages] if family == "llama" else messages
        whole = template.render(trimmed, [], prompt=True)
        shown = template.tokenizer.decode(after)
        assert (shown if family != "llama" else shown.replace(" two words ", "two words").replace("hello\n\n", "hello")) == whole


@pytest.mark.parametrize("family", [*STABLE, "qwen3"])
def test_append_keeps_token_ids_that_encoding_would_not_give(family):
    template, builder = chat(family), started(Append, family)
    response = [*bytewise(template, "hello world"), template.tokenizer.eos_token_id]
    before = builder.context()
    builder.extend(response, Observation("next", "tool"))
    assert builder.context()[len(before): len(before) + len(response)] == response


@pytest.mark.parametrize("family", [*STABLE, "qwen3"])
def test_a_cut_response_is_closed_by_an_end_of_turn_token_that_nobody_sampled(family):
    template = chat(family)
    eos, words = template.tokenizer.eos_token_id, template.encode("hello world")
    closed, cut = started(Append, family), started(Append, family)
    closed.extend([*words, eos], Observation("next", "tool"))
    cut.extend(words, Observation("next", "tool"))
    assert cut.context() == closed.context()
    assert cut.context()[len(started(Append, family).context()) + len(words)] == eos


def test_append_with_qwen3_keeps_thoughts_while_tools_answer_and_refuses_a_new_question():
    template, builder = chat("qwen3"), started(Append, "qwen3")
    text = "<think>\nhm\n</think>\n\nhello"
    builder.extend([*template.encode(text), template.tokenizer.eos_token_id], Observation("next", "tool"))
    assert template.tokenizer.decode(builder.context()) == template.render(
        [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}, {"role": "tool", "content": "next"}], [], prompt=True)
    before = builder.context()
    with pytest.raises(ValueError, match=r"rewrites an earlier message when a 'user' message follows.*environment\.context=template"):
        builder.extend([template.tokenizer.eos_token_id], Observation("next", "user"))
    assert builder.context() == before


def test_append_refuses_a_template_that_does_not_close_messages_with_the_stop_token():
    template = chat("chatml")
    broken = type(template)(template.tokenizer)
    broken.render = lambda messages, tools, *, prompt: "".join(f"{message['content']}\n" for message in messages)
    with pytest.raises(ValueError, match=r"ends it with no token of its own"):
        broken.delta(says(template, "hello"), Observation("next"))


def test_template_context_is_the_whole_chat_rendered_anew_and_drops_earlier_thoughts():
    template, builder = chat("qwen3"), started(Template, "qwen3")
    eos = template.tokenizer.eos_token_id
    builder.extend([*template.encode("<think>\nhm\n</think>\n\nhello"), eos], Observation("result", "tool"))
    kept = builder.context()
    assert "hm" in template.tokenizer.decode(kept)
    builder.extend([*template.encode("world"), eos], Observation("another question", "user"))
    rewritten = builder.context()
    assert template.tokenizer.decode(rewritten) == (
        "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\n<tool_response>\nresult\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nworld<|im_end|>\n<|im_start|>user\nanother question<|im_end|>\n<|im_start|>assistant\n")
    assert rewritten[: len(kept)] != kept


@pytest.mark.parametrize("context", ["append", "template"])
def test_the_recorded_hash_is_of_what_the_engine_saw(context):
    """Under a template that drops a thought when the next question comes, each turn still holds its own c_k."""
    engine = parrot_engine("qwen3")
    word = engine._reply

    def think(seen, sampling):
        return [*chat("qwen3").encode("<think>\nhm\n</think>\n\n"), *word(seen, sampling)]

    engine._reply = think
    role = "tool" if context == "append" else "user"
    rollout = run(episode(lambda: Parrot(role=role), "qwen3", context=context, max_response_tokens=40), engine)
    assert len(rollout.turns) == 3
    for turn, (seen, _) in zip(rollout.turns, engine.requests, strict=True):
        assert turn.context_ids == seen and turn.context_hash == context_hash(seen)
    first, second, third = rollout.turns
    grows = third.context_ids[: len(second.context_ids) + len(second.response_ids)] == second.context_ids + second.response_ids
    assert grows == (context == "append")
    assert ("hm" in chat("qwen3").tokenizer.decode(third.context_ids)) == (context == "append")


@pytest.mark.parametrize("builder", [Append, Template, lambda template: Window(template, 2), Summary])
def test_snapshots_of_contexts_are_independent(builder):
    template, trunk = chat("chatml"), started(builder, "chatml")
    response = [*template.encode("hello"), template.tokenizer.eos_token_id]
    trunk.extend(response, Observation("next"))
    snapshot, context = trunk.snapshot(), trunk.context()
    trunk.extend(response, Observation("more"))
    assert trunk.context() != context
    for _ in range(2):
        sibling = builder(template)
        sibling.restore(snapshot)
        assert sibling.context() == context
        sibling.extend(response, Observation("other"))
        sibling.context().append(0)  # a context that was handed out is nobody's state


def test_system_text_and_tools_are_part_of_the_first_context():
    template = chat("chatml")
    schema = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}}
    for name in contexts.BUILDERS:
        made = build_context(name, template, 1)
        made.start("be kind", [schema], Observation("question"))
        assert template.tokenizer.decode(made.context()) == (
            "<|im_start|>system: look<|im_end|>\n<|im_start|>system\nbe kind<|im_end|>\n"
            "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n")


def test_the_environment_reads_the_response_without_the_end_of_turn_token_only():
    template = chat("chatml")
    eos = template.tokenizer.eos_token_id
    assert template.response_text([*template.encode(" a<tool_call>"), eos]) == " a<tool_call>"
    assert template.response_text([eos]) == ""
    assert template.response_text([eos, eos]) == "<|im_end|>"
    assert template.response_text(template.encode("cut")) == "cut"


def says(template, text):
    return [*template.encode(text), template.tokenizer.eos_token_id]


def chatml(*messages):
    """What ChatML makes of (role, content) messages and a prompt."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages) + "<|im_start|>assistant\n"


def opened(name, system="be kind", window=1, family="chatml"):
    """A builder by name after system and question, and its context as text."""
    made = build_context(name, chat(family), window)
    made.start(system, [], Observation("question"))
    return made, lambda: chat(family).tokenizer.decode(made.context())


@pytest.mark.parametrize(("name", "kind"), [("append", Append), ("template", Template), ("window", Window), ("summary", Summary)])
def test_builders_are_made_by_name_and_only_summary_asks_for_summaries(name, kind):
    made, _ = opened(name)
    assert type(made) is kind and set(contexts.BUILDERS) == {"append", "template", "window", "summary"}
    assert made.summary_request() is None
    made.extend(says(chat("chatml"), "hello"), Observation("next"))
    assert (made.summary_request() is not None) == (name == "summary")
    if name != "summary":
        with pytest.raises(TypeError, match=f"{kind.__name__} keeps no summaries"):
            made.summarise(says(chat("chatml"), "hello"))


@pytest.mark.parametrize("system", ["", "be kind"])
@pytest.mark.parametrize("window", [1, 2, 9])
def test_a_window_shows_the_opening_and_the_last_turns(window, system):
    builder, shown = opened("window", system, window)
    opening = [*([("system", system)] if system else []), ("user", "question")]
    assert shown() == chatml(*opening)
    turns = []
    for k in range(4):
        builder.extend(says(chat("chatml"), f"answer {k}"), Observation(f"word {k}", ("user", "tool")[k % 2]))
        turns.append([("assistant", f"answer {k}"), (("user", "tool")[k % 2], f"word {k}")])
        assert shown() == chatml(*opening, *(message for turn in turns[-window:] for message in turn))
    assert "answer 0" not in shown() or window == 9
    builder.start("", [], Observation("another"))
    assert shown() == chatml(("user", "another"))


def test_a_window_as_long_as_the_episode_is_the_template_context():
    whole, window = opened("template", family="qwen3")[0], opened("window", window=3, family="qwen3")[0]
    for k in range(3):
        for builder in (whole, window):
            builder.extend(says(chat("qwen3"), f"<think>\nhm\n</think>\n\nhello {k}"), Observation(f"word {k}", "tool"))
        assert window.context() == whole.context()


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window is 0; expected at least 1"):
        build_context("window", chat("chatml"), 0)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_summaries_stand_in_for_their_turns(role):
    builder, shown = opened("summary")
    template, system = chat("chatml"), ("system", "be kind")
    asked = [("user", f"word 0\n\n{SUMMARY_REQUEST}")] if role == "user" else [("tool", "word 0"), ("user", SUMMARY_REQUEST)]
    assert shown() == chatml(system, ("user", "question"))

    builder.extend(says(template, "answer 0"), Observation("word 0", role))
    assert template.tokenizer.decode(builder.summary_request()) == chatml(system, ("user", "question"), ("assistant", "answer 0"), *asked)
    builder.summarise(says(template, "said hello"))
    assert builder.summary_request() is None
    assert shown() == chatml(system, ("user", "question\n\nTurns so far:\n- said hello"))

    builder.extend(says(template, "answer 1"), Observation("word 0", role))
    assert template.tokenizer.decode(builder.summary_request()) == chatml(
        system, ("user", "question\n\nTurns so far:\n- said hello"), ("assistant", "answer 1"), *asked)
    builder.summarise(says(template, "said\n world  again "))
    assert shown() == chatml(system, ("user", "question\n\nTurns so far:\n- said hello\n- said world again"))
    builder.start("", [], Observation("another"))
    assert shown() == chatml(("user", "another"))


def test_a_summary_is_asked_for_after_the_context_that_its_turn_saw():
    """Up to the response both are the same tokens, so an engine computes them once."""
    template, (builder, _) = chat("chatml"), opened("summary")
    for k in range(3):
        seen = builder.context()
        builder.extend(says(template, f"answer {k}"), Observation("next"))
        assert builder.summary_request()[: len(seen)] == seen
        builder.summarise(says(template, f"turn {k}"))


def test_a_summary_loses_its_thought_but_not_an_unfinished_one():
    template, (builder, shown) = chat("qwen3"), opened("summary", "", family="qwen3")
    builder.extend(says(template, "hello"), Observation("next"))
    builder.summarise(says(template, "<think>\nhm\n</think>\n\nsaid hello"))
    assert shown() == chatml(("user", "question\n\nTurns so far:\n- said hello"))
    builder.extend(says(template, "hello"), Observation("next"))
    builder.summarise(template.encode("<think>\nhm"))
    assert shown() == chatml(("user", "question\n\nTurns so far:\n- said hello\n- <think> hm"))


@pytest.mark.parametrize("system", ["", "be kind"])
@pytest.mark.parametrize("name", ["window", "summary"])
def test_user_and_assistant_alternate_whatever_is_rendered(name, system):
    template = type(chat("chatml"))(chat("chatml").tokenizer)
    rendered, render = [], template.render

    def record(messages, tools, *, prompt):
        rendered.append([message["role"] for message in messages])
        return render(messages, tools, prompt=prompt)

    template.render = record
    builder = build_context(name, template, 2)
    builder.start(system, [], Observation("question"))
    for _ in range(4):
        builder.context()
        builder.extend(says(template, "hello"), Observation("next"))
        if builder.summary_request() is not None:
            builder.summarise(says(template, "said hello"))
    assert len(rendered) == (8 if name == "summary" else 4)
    for roles in rendered:
        spoken = roles[1:] if system else roles
        assert "system" not in spoken and spoken == ["user", "assistant"] * (len(spoken) // 2) + ["user"]


@pytest.mark.parametrize("family", [*STABLE, "qwen3"])
def test_every_family_renders_windows_and_summaries(family):
    template = chat(family)
    for name in ("window", "summary"):
        builder, shown = opened(name, "", family=family)
        for k in range(3):
            builder.extend(says(template, f"hello {k}"), Observation(f"world {k}"))
            if name == "summary":
                assert "world" in template.tokenizer.decode(builder.summary_request())
                builder.summarise(says(template, f"told {k}"))
        text = shown()
        assert "question" in text and "hello 0" not in text
        assert ("hello 2" in text and "world 2" in text) if name == "window" else [f"told {k}" in text for k in range(3)] == [True] * 3


@pytest.mark.parametrize("asked", [False, True])
def test_summary_snapshots_hold_the_summaries_and_the_raw_turn(asked):
    template, (trunk, _) = chat("chatml"), opened("summary")
    for text in ("one", "two"):
        trunk.extend(says(template, "hello"), Observation("next"))
        trunk.summarise(says(template, text))
    if asked:
        trunk.extend(says(template, "world"), Observation("raw"))
    snapshot, context, request = trunk.snapshot(), trunk.context(), trunk.summary_request()
    if not asked:
        trunk.extend(says(template, "world"), Observation("raw"))
    trunk.summarise(says(template, "three"))
    for _ in range(2):
        sibling = build_context("summary", template, 1)
        sibling.restore(snapshot)
        assert (sibling.context(), sibling.summary_request()) == (context, request)
        sibling.extend(says(template, "other"), Observation("other"))
        sibling.summarise(says(template, "four"))
