"""One episode on a scripted engine: what is recorded, what differs between siblings, and what is refused."""

import asyncio
import dataclasses

import pytest
from chats import chat
from worlds import Drifting, Parrot, ReplayedParrot, Slow, episode, parrot_engine, run, settings

from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import Environment, Observation, Step
from rtpo_ray.environments.lookup import Lookup
from rtpo_ray.episodes.episode import Episode
from rtpo_ray.errors import ContextMismatch
from rtpo_ray.types import derive_seed

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
