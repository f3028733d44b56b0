"""Records check themselves when they are made, and survive the way between processes."""

import pickle

import pytest
from records import group, random_rollout, rng_of, sibling, turn_record

from rtpo_ray import errors
from rtpo_ray.types import Boundary, Completion, Sample, Sampling, Task, context_hash, derive_seed


def test_the_loss_mask_is_true_exactly_on_sampled_tokens():
    record = turn_record(context=(5, 9, 7), response=(3, 2))
    assert record.loss_mask == (False, False, False, True, True)


@pytest.mark.parametrize(("changes", "message"), [
    ({"context": ()}, "turn 2: context has 0 tokens and response 2"),
    ({"response": ()}, "turn 2: context has 2 tokens and response 0"),
    ({"engine_logprobs": (-0.5,)}, "turn 2: 2 response tokens but 1 log-probabilities"),
    ({"engine_logprobs": (-0.5,) * 3}, "turn 2: 2 response tokens but 3 log-probabilities"),
    ({"context_hash": context_hash((1, 3))}, f"turn 2: context hash {context_hash((1, 3))} is not that of its 2 token ids"),
])
def test_turn_records_out_of_step_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        turn_record(2, **changes)


@pytest.mark.parametrize(("token_ids", "logprobs"), [((), ()), ((1,), ()), ((1, 2), (-0.1,))])
def test_completions_out_of_step_are_refused(token_ids, logprobs):
    with pytest.raises(ValueError, match=f"completion has {len(token_ids)} token ids and {len(logprobs)} log-probabilities"):
        Completion(token_ids=token_ids, logprobs=logprobs, finish_reason="stop", weight_version=0)


@pytest.mark.parametrize(("response", "logprobs"), [([], []), ([1], []), ([1, 2], [-0.1])])
def test_samples_out_of_step_are_refused(response, logprobs):
    with pytest.raises(ValueError, match=f"sample s: {len(response)} response tokens, {len(logprobs)} log-probabilities"):
        Sample(sample_id="s", context_ids=[1], context_hash="", response_ids=response, engine_logprobs=logprobs, advantage=1.0, weight=1.0)


def test_context_hashes_depend_on_every_token_and_its_place():
    contexts = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (12,), (1, 2, 0), (2**31 - 1,)]
    assert len({context_hash(context) for context in contexts}) == len(contexts)
    assert context_hash([1, 2]) == context_hash((1, 2)) == context_hash(range(1, 3))


def test_seeds_depend_on_every_part_and_are_the_same_in_every_process():
    assert derive_seed(0, "train", 3) == derive_seed(0, "train", 3) == 524525817
    parts = [(0, "train", 3), (1, "train", 3), (0, "eval", 3), (0, "train", 4), (0, "train"), (0, "train", 3, 0), ("0train", 3), (0, "train3")]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    many = {derive_seed(0, turn, sibling) for turn in range(20) for sibling in range(100)}
    assert len(many) == 2000 and all(0 <= seed < 2**31 for seed in many)


def test_returns_to_go_sum_the_recorded_turns():
    assert sibling("a", 0.25, 0.0, 1.0).returns_to_go == 1.25
    assert sibling("a").returns_to_go == 0.0


def test_defaults_say_that_a_record_is_a_trunks_action_in_its_own_context():
    record = turn_record()
    assert (record.kind, record.train_context_ids, sibling("a", parent="").parent) == ("action", (), "")
    sample = Sample(sample_id="s", context_ids=[1], context_hash="h", response_ids=[2], engine_logprobs=[-1.0], advantage=1.0, weight=0.0)
    assert (sample.rollout_id, sample.group_id, sample.turn, sample.reward) == ("", "", 0, 0.0)


def test_records_survive_pickling():
    rng = rng_of(3)
    rollout = random_rollout(rng, "t/0")
    records = [rollout, group(rollout), Task(task_id="t", seed=1, payload={"a": [1]}),
               Sampling(temperature=0.5, max_tokens=3, stop_token_ids=(0,), seed=4),
               Completion(token_ids=(1,), logprobs=(-1.0,), finish_reason="length", weight_version=3),
               Boundary(turn=1, context_hash="c", state_hash="s", snapshot=b"\x00\xff"),
               Sample(sample_id="s", context_ids=[1], context_hash="h", response_ids=[2], engine_logprobs=[-1.0], advantage=1.0, weight=0.5)]
    assert pickle.loads(pickle.dumps(records)) == records


@pytest.mark.parametrize("kind", [value for value in vars(errors).values() if isinstance(value, type)], ids=lambda kind: kind.__name__)
def test_errors_survive_pickling_with_their_message(kind):
    error = pickle.loads(pickle.dumps(kind("turn 3: lost")))
    assert (type(error), str(error)) == (kind, "turn 3: lost")
    assert isinstance(error, errors.RtpoError)
