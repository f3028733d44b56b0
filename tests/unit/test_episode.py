"""One episode on a scripted engine: what is recorded, what differs between siblings, and what is refused."""

import asyncio
import dataclasses

import pytest
from chats import chat
from worlds import Drifting, Parrot, ReplayedParrot, Slow, episode, parrot_engine, run, settings

from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import Environment, Observation, Step
from rtpo_ray.environments.guess import Guess
from rtpo_ray.environments.lookup import Lookup
from rtpo_ray.episodes.contexts import SUMMARY_REQUEST
from rtpo_ray.episodes.episode import Episode
from rtpo_ray.errors import ContextMismatch
from rtpo_ray.timeline import Timeline
from rtpo_ray.types import Task, derive_seed

EOS = chat("chatml").tokenizer.eos_token_id


def scripted(*texts, eos=True, **options):
    """Says these texts in order."""
    replies = iter([[*chat("chatml").encode(text), *([EOS] if eos else [])] for text in texts])
    return ScriptedEngine(lambda context, sampling: next(replies), **options)


def test_a_record_holds_what_engine_and_environment_saw():
    engine = parrot_engine(weight_version=7, logprobs=lambda context, response: [-float(i) for i in range(len(response))])
    started = episode()
    states = [started.boundary().state_hash]
    rollout = run(started, engine, temperature=0.7)
    assert (rollout.rollout_id, rollout.task_id, rollout.end, rollout.failure, rollout.boundaries) == ("t/0", "t", "terminated", "", ())
    assert [turn.turn for turn in rollout.turns] == [0, 1, 2]
    for turn, (context, sampling) in zip(rollout.turns, engine.requests, strict=True):
        assert (turn.context_ids, turn.seed, turn.temperature) == (context, sampling.seed, 0.7)
        assert (turn.weight_version, turn.finish_reason, turn.response_ids[-1]) == (7, "stop", EOS)
        assert turn.engine_logprobs == tuple(-float(i) for i in range(len(turn.response_ids)))
        assert turn.loss_mask == (False,) * len(context) + (True,) * len(turn.response_ids)
        assert (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids) == (0.7, 8, (EOS,))
    assert rollout.turns[0].state_hash == states[0] and len({turn.state_hash for turn in rollout.turns}) == 3
    assert [turn.reward for turn in rollout.turns] == [0.0, 0.0, 1.0] and rollout.returns_to_go == 1.0
    assert [turn.observation[:4] for turn in rollout.turns] == ["say ", "say ", ""]
    assert [turn.tool_calls for turn in rollout.turns] == [1, 1, 0]


def test_every_sampled_token_is_trained_once_and_nothing_else():
    """In the last context, exactly the tokens outside c_0, the observations and added ends of turn were sampled."""
    rollout = run(episode(max_response_tokens=2), scripted("hello world", "hello world", "hello world", eos=False))
    assert [turn.finish_reason for turn in rollout.turns] == ["length"] * 3
    for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False):
        seen = earlier.context_ids + earlier.response_ids
        assert later.context_ids[: len(seen)] == seen
        assert later.context_ids[len(seen)] == EOS  # closes the cut response, and is context: nobody sampled it
        assert EOS not in earlier.response_ids
        assert sum(later.loss_mask) == len(later.response_ids) == 2


def test_boundaries_are_kept_for_every_turn_when_asked():
    rollout = run(episode(), parrot_engine(), keep_boundaries=True)
    assert [(b.turn, b.context_hash, b.state_hash) for b in rollout.boundaries] == [(t.turn, t.context_hash, t.state_hash) for t in rollout.turns]


def test_only_what_the_environment_takes_its_time_over_is_on_the_timeline():
    class Dawdling(Slow):
        seconds = 0.005

    for world, names in ((Parrot, set()), (Dawdling, {"Dawdling.step"})):
        timeline = Timeline("g")
        made = Episode(world, chat("chatml"), settings(), timeline)
        made.reset(Task(task_id="t", seed=1))
        run(made, parrot_engine())
        spans = [span for span in timeline.take() if span.end - span.start >= 0.005 or not names]
        assert {span.name for span in spans} == names
        assert [(span.lane, span.flight) for span in spans] == [("environment", True)] * 3 * len(names)


def test_seeds_differ_by_sibling_and_turn_and_are_the_same_in_a_rerun():
    def seeds(sibling):
        engine = parrot_engine()
        run(episode(), engine, seed=derive_seed(0, f"t/0/{sibling}"))
        return [sampling.seed for _, sampling in engine.requests]

    every = [seeds(sibling) for sibling in range(8)]
    assert len({seed for one in every for seed in one}) == 24
    assert [seeds(sibling) for sibling in range(8)] == every


def test_a_sibling_uses_the_seed_of_its_own_turn():
    trunk = run(episode(), parrot_engine(), keep_boundaries=True)
    engine = parrot_engine()
    sibling = Episode(Parrot, chat("chatml"), settings())
    sibling.restore(trunk.boundaries[2])
    run(sibling, engine, seed=5)
    assert [sampling.seed for _, sampling in engine.requests] == [derive_seed(5, 2)]


@pytest.mark.parametrize("context", ["append", "template"])
@pytest.mark.parametrize("world", [Parrot, ReplayedParrot, Lookup, lambda: Lookup(replay=True)])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_siblings_start_where_the_trunk_stood_and_play_the_same_future(world, context, turn):
    texts = ["<tool_call>x</tool_call>", '<tool_call>{"name": "lookup", "arguments": {"entity": "Ada", "relation": "boss"}}</tool_call>', "Ada"]
    trunk = run(episode(world, context=context, max_response_tokens=90), scripted(*texts), keep_boundaries=True)
    assert len(trunk.turns) == 3
    for _ in range(2):
        sibling = Episode(world, chat("chatml"), settings(context=context, max_response_tokens=90))
        sibling.restore(trunk.boundaries[turn])
        continued = run(sibling, scripted(*texts[turn:]), rollout_id="t/0", keep_boundaries=True)
        assert continued.turns == trunk.turns[turn:]
        assert [(b.turn, b.context_hash, b.state_hash) for b in continued.boundaries] == [
            (b.turn, b.context_hash, b.state_hash) for b in trunk.boundaries[turn:]]


def test_copy_and_replay_give_the_same_episode():
    copied, replayed = (run(episode(world), parrot_engine(), keep_boundaries=True) for world in (Parrot, ReplayedParrot))
    assert copied.turns == replayed.turns
    for turn in range(3):
        both = []
        for world, trunk in ((Parrot, copied), (ReplayedParrot, replayed)):
            sibling = Episode(world, chat("chatml"), settings())
            sibling.restore(trunk.boundaries[turn])
            both.append(run(sibling, parrot_engine(wrong=lambda seed: seed % 2)))
        assert both[0] == both[1]
        assert both[0].turns[0].context_ids == copied.turns[turn].context_ids


def test_siblings_of_one_boundary_do_not_touch_each_other_even_at_once():
    trunk = run(episode(), parrot_engine(), keep_boundaries=True)

    async def all_at_once():
        siblings = [Episode(Parrot, chat("chatml"), settings()) for _ in range(16)]
        for sibling in siblings:
            sibling.restore(trunk.boundaries[1])
        engine = parrot_engine(wrong=lambda seed: seed % 4 == 0)
        return await asyncio.gather(*(
            sibling.run(engine, rollout_id=f"t/0/1/{i}", task_id="t", seed=i, temperature=1.0) for i, sibling in enumerate(siblings)))

    rollouts = asyncio.run(all_at_once())
    right = [all(derive_seed(i, turn) % 4 for turn in (1, 2)) for i in range(16)]
    assert [rollout.returns_to_go for rollout in rollouts] == [float(one) for one in right]
    assert len(set(right)) == 2
    assert {rollout.turns[0].context_ids for rollout in rollouts} == {trunk.turns[1].context_ids}
    assert {rollout.turns[0].state_hash for rollout in rollouts} == {trunk.turns[1].state_hash}


@pytest.mark.parametrize(("field", "message"), [("state_hash", "restored environment has state hash"), ("context_hash", "restored context has hash")])
def test_a_boundary_that_does_not_restore_is_refused(field, message):
    trunk = run(episode(), parrot_engine(), keep_boundaries=True)
    wrong = dataclasses.replace(trunk.boundaries[1], **{field: "0123"})
    with pytest.raises(ContextMismatch, match=f"turn 1: {message} {getattr(trunk.boundaries[1], field)}, the trunk had 0123"):
        Episode(Parrot, chat("chatml"), settings()).restore(wrong)


def test_an_environment_that_drifts_from_its_seed_cannot_be_replayed():
    trunk = run(episode(Drifting), parrot_engine(), keep_boundaries=True)
    with pytest.raises(ContextMismatch, match="the environment is not deterministic under its seed"):
        Episode(Drifting, chat("chatml"), settings()).restore(trunk.boundaries[2])


def test_a_context_without_room_ends_the_episode_as_overlong():
    first = len(run(episode(), parrot_engine()).turns[0].context_ids)
    assert run(episode(max_model_len=first), parrot_engine()).end == "overlong"
    assert run(episode(max_model_len=first), parrot_engine()).turns == ()
    engine = parrot_engine(wrong=lambda seed: True, max_model_len=first + 2)
    rollout = run(episode(max_model_len=first + 2), engine, keep_boundaries=True)
    assert (rollout.end, len(rollout.turns), len(rollout.boundaries)) == ("overlong", 1, 1)
    assert engine.requests[0][1].max_tokens == 2  # what is left, below max_response_tokens


def test_the_turn_limit_truncates():
    rollout = run(episode(max_turns=2), parrot_engine())
    assert (rollout.end, len(rollout.turns), rollout.returns_to_go) == ("truncated", 2, 0.0)


def test_a_step_that_overruns_names_environment_limit_and_turn():
    with pytest.raises(TimeoutError, match=r"Slow\.step took longer than environment\.step_timeout \(0\.02 s\) at turn 0"):
        run(episode(Slow, step_timeout=0.02), parrot_engine())


def test_a_slow_step_leaves_the_event_loop_free():
    async def ticks():
        task = asyncio.ensure_future(episode(lambda: Slow(turns=1)).run(parrot_engine(), rollout_id="t/0", task_id="t", seed=1, temperature=1.0))
        count = 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count, task.result().returns_to_go

    count, outcome = asyncio.run(ticks())
    assert count > 5 and outcome == 1.0


class Says(Environment):
    """Answers every response with the step it was made with, or raises it."""

    def __init__(self, outcome, instant):
        super().__init__()
        self.outcome, self.instant = outcome, instant

    def reset(self, seed):
        return Observation("question")

    def step(self, response_text):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize("instant", [True, False])
@pytest.mark.parametrize(("outcome", "error", "message"), [
    (Step(), ValueError, r"Says\.step returned observation None with terminated=False, truncated=False"),
    (Step(observation=Observation("x"), terminated=True), ValueError, "terminated=True, truncated=False; expected an observation exactly while"),
    (Step(observation=Observation("x"), truncated=True), ValueError, "terminated=False, truncated=True"),
    (Step(reward=float("nan"), terminated=True), ValueError, r"Says\.step returned reward nan at turn 0; expected a finite number"),
    (Step(reward=float("-inf"), terminated=True), ValueError, "returned reward -inf at turn 0"),
    (TimeoutError("the sandbox did not answer"), TimeoutError, "^the sandbox did not answer$"),
    (KeyError("door"), KeyError, "door"),
])
def test_an_environment_that_lies_or_raises_is_quoted(outcome, error, message, instant):
    with pytest.raises(error, match=message):
        run(episode(lambda: Says(outcome, instant)), scripted("hello"))


def test_an_environment_may_truncate():
    rollout = run(episode(lambda: Says(Step(reward=0.5, truncated=True), True)), scripted("hello"))
    assert (rollout.end, rollout.returns_to_go, rollout.turns[0].observation) == ("truncated", 0.5, "")


def test_an_engine_error_is_not_wrapped():
    with pytest.raises(RuntimeError, match="^lost$"):
        run(episode(), parrot_engine(failures={1: RuntimeError("lost")}))


BUILDERS = ["append", "template", "window", "summary"]


def guessing(context, seed=0, replay=False, **changes):
    return episode(lambda: Guess(replay=replay, guesses=6), seed=seed, context=context, max_turns=6, **changes)


def guesser(**options):
    """Says a number, or a summary where one is asked for, that depends on what it sees and on the seed."""
    template = chat("chatml")

    def reply(context, sampling):
        asked = SUMMARY_REQUEST in template.tokenizer.decode(context)
        text = f"summary {sampling.seed % 1000}" if asked else str((sampling.seed + len(context)) % 15 + 1)
        return [*template.encode(text), EOS]

    return ScriptedEngine(reply, **options)


def long_game(context, **changes):
    """(rollout of at least 4 turns, its seed)."""
    for seed in range(50):
        rollout = run(guessing(context, seed, **changes), guesser(), seed=seed, keep_boundaries=True)
        if len(rollout.boundaries) >= 4:
            return rollout, seed
    raise AssertionError("every game was short")


def actions(rollout):
    return [turn for turn in rollout.turns if turn.kind == "action"]


def test_a_summary_is_recorded_as_its_own_turn_record():
    engine = parrot_engine(weight_version=7)
    word = engine._reply
    engine._reply = lambda seen, sampling: (
        [*chat("chatml").encode("I spoke"), EOS] if SUMMARY_REQUEST in chat("chatml").tokenizer.decode(seen) else word(seen, sampling))
    rollout = run(episode(lambda: Parrot(turns=3), context="summary"), engine, seed=5, temperature=0.7, keep_boundaries=True)
    assert [(turn.turn, turn.kind) for turn in rollout.turns] == [(0, "action"), (0, "summary"), (1, "action"), (1, "summary"), (2, "action")]
    for turn, (context, sampling) in zip(rollout.turns, engine.requests, strict=True):
        assert (turn.context_ids, turn.seed, turn.temperature, sampling.max_tokens) == (context, sampling.seed, 0.7, 8)
    states = [boundary.state_hash for boundary in rollout.boundaries]
    for record, action in zip(rollout.turns[1::2], rollout.turns[::2], strict=False):
        assert record.seed == derive_seed(5, record.turn, "summary")
        assert (record.reward, record.observation, record.tool_calls, record.malformed_calls, record.train_context_ids) == (0.0, "", 0, 0, ())
        assert record.response_ids == (*chat("chatml").encode("I spoke"), EOS) and record.finish_reason == "stop" and record.weight_version == 7
        assert record.state_hash == action.state_hash == states[record.turn]
    assert [(b.turn, b.context_hash, b.state_hash) for b in rollout.boundaries] == [(t.turn, t.context_hash, t.state_hash) for t in actions(rollout)]
    assert [turn.seed for turn in actions(rollout)] == [derive_seed(5, turn) for turn in range(3)]
    last = chat("chatml").tokenizer.decode(rollout.turns[-1].context_ids)
    assert last.endswith("!\n\nTurns so far:\n- I spoke\n- I spoke<|im_end|>\n<|im_start|>assistant\n") and last.count("say") == 1


def test_no_summary_of_the_last_turn_or_of_a_finished_episode():
    rollout = run(episode(context="summary", max_turns=2), scripted("hello", "I spoke", "hello"))
    assert [(turn.turn, turn.kind) for turn in rollout.turns] == [(0, "action"), (0, "summary"), (1, "action")] and rollout.end == "truncated"
    rollout = run(episode(lambda: Parrot(turns=1), context="summary"), scripted("hello"))
    assert [turn.kind for turn in rollout.turns] == ["action"] and rollout.end == "terminated"


def test_a_summary_gets_the_room_that_is_left_or_ends_the_episode_as_overlong():
    free = run(episode(context="summary"), scripted("hello", "I spoke", "hello", "I spoke", "hello"))
    request = len(free.turns[1].context_ids)
    engine = scripted("hello", "I spoke", "hello", "I spoke", "hello")
    run(episode(context="summary", max_model_len=request + 1), engine)
    assert engine.requests[1][1].max_tokens == 1
    rollout = run(episode(context="summary", max_model_len=request), scripted("hello"), keep_boundaries=True)
    assert (rollout.end, [turn.kind for turn in rollout.turns], len(rollout.boundaries)) == ("overlong", ["action"], 1)


@pytest.mark.parametrize("train_context", ["recorded", "concatenated"])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("context", BUILDERS)
def test_a_restored_episode_goes_on_as_the_trunk_did(context, replay, train_context):
    trunk, seed = long_game(context, replay=replay, window=2, train_context=train_context)
    assert any(turn.kind == "summary" for turn in trunk.turns) == (context == "summary")
    assert len(trunk.boundaries) == len(actions(trunk))
    for k, boundary in enumerate(trunk.boundaries):
        sibling = guessing(context, 999, replay=replay, window=2, train_context=train_context)
        sibling.restore(boundary)
        continued = run(sibling, guesser(), seed=seed, keep_boundaries=True)
        assert continued.turns == tuple(turn for turn in trunk.turns if turn.turn >= k)
        assert continued.end == trunk.end
        assert [(b.turn, b.context_hash, b.state_hash) for b in continued.boundaries] == [
            (b.turn, b.context_hash, b.state_hash) for b in trunk.boundaries[k:]]


@pytest.mark.parametrize("context", ["template", "window", "summary"])
def test_concatenated_contexts_are_those_that_append_alone_makes(context):
    """The same responses, seen in another context, are scored in the raw turns."""
    trunk, seed = long_game(context, train_context="concatenated")
    said = iter([turn.response_ids for turn in actions(trunk)])
    appended = run(guessing("append", seed), ScriptedEngine(lambda seen, sampling: next(said)), seed=seed)
    alone = run(guessing(context, seed), guesser(), seed=seed)
    assert [dataclasses.replace(turn, train_context_ids=()) for turn in trunk.turns] == list(alone.turns)
    for turn, raw in zip(actions(trunk), appended.turns, strict=True):
        assert (turn.train_context_ids or turn.context_ids) == raw.context_ids
        assert turn.response_ids == raw.response_ids
    differs = [bool(turn.train_context_ids) for turn in actions(trunk)]
    first = {"template": len(differs), "window": 2, "summary": 1}[context]  # the first turn that sees another context
    assert differs == [turn >= first for turn in range(len(differs))]
    assert {turn.train_context_ids for turn in alone.turns} | {turn.train_context_ids for turn in trunk.turns if turn.kind == "summary"} == {()}


def test_a_template_that_cannot_be_appended_to_cannot_be_concatenated():
    with pytest.raises(ValueError, match=r"rewrites an earlier message when a 'user' message follows.*environment\.train_context=recorded"):
        run(episode(lambda: Parrot(role="user"), "qwen3", context="window", train_context="concatenated"), parrot_engine("qwen3"))


def test_append_contexts_are_their_own_training_contexts():
    trunk, _ = long_game("append", train_context="concatenated")
    assert {turn.train_context_ids for turn in trunk.turns} == {()}


def test_an_episode_whose_training_context_leaves_no_room_is_overlong():
    free, seed = long_game("window", train_context="concatenated")
    third, fourth = actions(free)[2:4]
    assert len(fourth.train_context_ids) > len(fourth.context_ids) + 10

    def bounded(limit, train_context):
        engine = guesser()
        return run(guessing("window", seed, max_model_len=limit, train_context=train_context), engine, seed=seed, keep_boundaries=True), engine

    rollout, _ = bounded(len(fourth.train_context_ids), "concatenated")
    assert (rollout.end, len(rollout.turns), len(rollout.boundaries)) == ("overlong", 3, 3)
    assert bounded(len(fourth.train_context_ids), "recorded")[0].turns == tuple(
        dataclasses.replace(turn, train_context_ids=()) for turn in free.turns)
    rollout, engine = bounded(len(third.train_context_ids) + 1, "concatenated")
    assert rollout.end == "overlong" and engine.requests[2][1].max_tokens == 1
    assert all(len(turn.train_context_ids) + len(turn.response_ids) <= len(third.train_context_ids) + 1 for turn in rollout.turns)
