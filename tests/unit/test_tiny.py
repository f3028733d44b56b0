"""The tiny model's own parts: tokenizer, demonstrations laid out as rollouts are, and the cache of built models."""

import asyncio
import dataclasses
import json
import random

import pytest
from worlds import settings

from rtpo_ray import environments
from rtpo_ray.config import Config, EnvironmentConfig, WarmStartConfig
from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.episodes.contexts import ChatTemplate
from rtpo_ray.episodes.episode import Episode
from rtpo_ray.policy import tiny
from rtpo_ray.types import Task, derive_seed


def config():
    return Config(warm_start=WarmStartConfig(vocab=512, hidden=32, layers=1, steps=3), environment=EnvironmentConfig(args={"hops": 2}))


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(tiny.build_tokenizer(config()))


@pytest.mark.parametrize("text", [
    "", " ", "Ada", "  two  spaces ", "\n\n\ttab\r\n", "Who is the boss of the friend of Ada?", "0123456789",
    "\u00e9\u00df\u4e2d\u6587 \U0001f600\u200d\U0001f680 \u202e", "\x00\x1f\x7f\ufffd",
    '{"name": "lookup", "arguments": {"entity": "Ada", "relation": "boss"}}', "<tool_call>{}</tool_call><|im_end|>", "<tool_cal l>",
    "a\u0301 \u00e1"])
def test_any_text_survives_the_tokenizer(template, text):
    assert template.tokenizer.decode(template.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_one_token_each_and_the_call_is_short(template):
    assert [len(template.encode(token)) for token in tiny.SPECIAL] == [1] * len(tiny.SPECIAL)
    assert template.tokenizer.eos_token == "<|im_end|>" and template.tokenizer.pad_token == "<|endoftext|>"
    call = '<tool_call>{"name": "lookup", "arguments": {"entity": "Ada", "relation": "boss"}}</tool_call>'
    assert len(template.encode(call)) < 24 < len(call)


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_a_demonstration_is_laid_out_as_a_rollout_with_the_same_actions(template, noise):
    made = config()
    for index in range(15):
        script = list(tiny._script(made, index, noise))
        actions = [[*template.encode(action), template.tokenizer.eos_token_id] for _, _, action in script]
        ids, mask = tiny.demonstration(made, template, index, noise)
        episode = Episode(lambda: environments.build(made.environment), template, settings(max_turns=3, max_response_tokens=64))
        episode.reset(Task(task_id="t", seed=seed_of(made, index)))
        engine = replaying(actions)
        rollout = asyncio.run(episode.run(engine, rollout_id="r", task_id="t", seed=0, temperature=1.0))
        last = rollout.turns[-1]
        assert [list(turn.response_ids) for turn in rollout.turns] == actions
        assert ids == [*last.context_ids, *last.response_ids]
        expected = [False] * len(ids)
        for turn in rollout.turns:
            start = len(turn.context_ids)
            expected[start: start + len(turn.response_ids)] = [True] * len(turn.response_ids)
        assert mask == expected
        if noise == 0:
            assert (rollout.returns_to_go, len(rollout.turns)) == (1.0, 3)


def replaying(actions):
    """An engine that says these responses in order."""
    left = iter(actions)
    return ScriptedEngine(lambda context, sampling: next(left))


def seed_of(made, index):
    """The environment seed of a demonstration: the first draw of its random stream."""
    return random.Random(derive_seed(made.warm_start.seed, "demonstration", index)).randrange(2**31)


def test_demonstrations_differ_and_are_the_same_in_a_rerun(template):
    made = config()
    rows = [tiny.demonstration(made, template, index, 0.5) for index in range(20)]
    assert rows == [tiny.demonstration(made, template, index, 0.5) for index in range(20)]
    assert len({tuple(ids) for ids, _ in rows}) == 20


@pytest.fixture
def built(monkeypatch, template):
    """Training is instant; the configurations that were built."""
    made = []

    def warm_start(model, tokenizer, config, say):
        made.append(config)
        return 0.5

    monkeypatch.setattr(tiny, "warm_start", warm_start)
    monkeypatch.setattr(tiny, "build_tokenizer", lambda config: template.tokenizer)
    return made


def test_a_built_model_is_kept_for_its_options_and_no_others(tmp_path, built):
    def folder(**changes):
        made = config()
        made.warm_start.cache = str(tmp_path)
        for name, value in changes.items():
            section, field = name.split("__")
            setattr(made, section, dataclasses.replace(getattr(made, section), **{field: value}))
        return tiny.materialise(made, lines.append)

    lines = []
    first = folder()
    assert folder() == first and len(built) == 1
    assert first.parent == tmp_path and first.name.startswith("tiny-lookup-")
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen3" and (first / "tokenizer.json").is_file()
    assert len(lines) == 2 and "3 supervised steps" in lines[0] and "last loss 0.500" in lines[1]
    # what does not make the model does not make another folder
    assert folder(run__seed=5, learner__lr=1.0, environment__step_timeout=1.0, algorithm__args={"n_siblings": 3}) == first and len(built) == 1
    others = [folder(**change) for change in (
        {"warm_start__steps": 4}, {"warm_start__noise": 0.1}, {"warm_start__seed": 1}, {"warm_start__lr": 0.1}, {"warm_start__batch": 3},
        {"environment__args": {"hops": 1}}, {"environment__max_turns": 4})]
    assert len({first, *others}) == 8 == len(built)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # no scratch folder is left


def test_a_half_built_folder_is_built_again(tmp_path, built):
    made = config()
    made.warm_start.cache = str(tmp_path)
    folder = tiny.materialise(made, lambda line: None)
    (folder / "config.json").unlink()
    assert tiny.materialise(made, lambda line: None) == folder
    assert len(built) == 2 and (folder / "config.json").is_file()


def test_the_vocabulary_is_padded_and_tied(template):
    model = tiny.build_model(config(), template.tokenizer)
    assert model.config.vocab_size % 64 == 0 and model.config.vocab_size >= len(template.tokenizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == template.tokenizer.eos_token_id
