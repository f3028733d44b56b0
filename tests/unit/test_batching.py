"""Samples to micro-batches: every sample once, whatever the order, and tensors that point at the right tokens."""

import random

import pytest
import torch

from rtpo_ray.errors import ContextMismatch
from rtpo_ray.policy.batching import assign_steps, check_samples, check_unique, collate, dummy, length, plan_micro_batches
from rtpo_ray.types import Sample, context_hash


def make(name, context, response, weight=0.5, advantage=1.0, engine=None):
    return Sample(sample_id=name, context_ids=context, context_hash=context_hash(context), response_ids=response,
                  engine_logprobs=engine or [-0.5] * len(response), advantage=advantage, weight=weight)


def many(count, seed=0):
    rng = random.Random(seed)
    return [make(f"s{i:03d}", [1] * rng.randint(1, 20), [2] * rng.randint(1, 9)) for i in range(count)]


def test_collate_values():
    batch = collate([make("a", [5, 6, 7], [8, 9], 0.5, 2.0, [-0.1, -0.2]), make("b", [4], [3], 0.25, -1.0, [-0.3])])
    assert batch.sample_ids == ("a", "b")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.columns.tolist() == [2, 3, 0]  # the logits at a position predict the next token
    assert batch.targets.tolist() == [8, 9, 3]
    assert batch.input_ids[batch.rows, batch.columns + 1].tolist() == batch.targets.tolist()
    assert batch.weights.tolist() == [0.25, 0.25, 0.25]  # weight / T: .5 / 2, .5 / 2, .25 / 1
    assert batch.advantages.tolist() == [2.0, 2.0, -1.0]
    assert batch.engine_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert {name: part.tolist() for name, part in batch.split(torch.tensor([1, 2, 3])).items()} == {"a": [1, 2], "b": [3]}


def test_weights_sum_to_one_a_group_whatever_the_lengths():
    group = [make("a", [1], [2] * 7, 1 / 3), make("b", [1], [2], 1 / 3), make("c", [1], [2] * 30, 1 / 3)]
    assert collate(group).weights.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("budget", [29, 64, 100, 1000])
def test_plan_holds_every_sample_once_within_the_budget(budget):
    samples = many(50)
    batches = plan_micro_batches(samples, budget)
    assert sorted(s.sample_id for batch in batches for s in batch) == [s.sample_id for s in samples]
    assert all(len(batch) * max(length(s) for s in batch) <= budget for batch in batches)
    assert len(batches) > 1 or budget == 1000


def test_plan_does_not_depend_on_arrival_order():
    samples = many(30)
    shuffled = random.Random(1).sample(samples, k=30)
    assert plan_micro_batches(shuffled, 64) == plan_micro_batches(samples, 64)
    assert plan_micro_batches([], 64) == []


def test_steps_hold_every_sample_once_and_follow_the_seed():
    names = [f"s{i}" for i in range(11)]
    steps = assign_steps(names, 4, seed=3)
    assert sorted(steps) == sorted(names)
    assert sorted(list(steps.values()).count(step) for step in range(4)) == [2, 3, 3, 3]
    assert assign_steps(reversed(names), 4, seed=3) == steps
    assert assign_steps(names, 4, seed=4) != steps


def test_context_mismatch_names_sample_and_both_hashes():
    other = context_hash([1, 2, 4])
    wrong = Sample(sample_id="task-3/1", context_ids=[1, 2, 3], context_hash=other, response_ids=[1], engine_logprobs=[-1.0], advantage=1.0,
                   weight=1.0)
    with pytest.raises(ContextMismatch, match=f"sample task-3/1: .*{context_hash([1, 2, 3])}.*{other}"):
        check_samples([make("good", [1], [2]), wrong], 64)


def test_unusable_samples_are_named():
    with pytest.raises(ValueError, match="sample long: 12 tokens, expected at most learner.micro_batch_tokens = 11"):
        check_samples([make("long", [1] * 10, [2, 2])], 11)
    with pytest.raises(ValueError, match="sample bare: context has 0 tokens"):
        check_samples([make("bare", [], [2])], 11)
    with pytest.raises(ValueError, match="samples a came more than once"):
        check_unique(["a", "b", "a"])


def test_dummy_weighs_nothing():
    batch = dummy()
    assert batch.sample_ids == () and batch.weights.tolist() == [0.0] and batch.input_ids.shape == (1, 1)
    assert batch.split(torch.zeros(1)) == {}
