"""Samples to padded micro-batches: every sample once, whatever the order, and tensors that point at the right tokens."""

import random

import pytest
import torch

from rtpo_ray.errors import ContextMismatch
from rtpo_ray.policy.batching import assign_steps, check_samples, check_unique, collate_padded, dummy, length, plan_rows, sequences
from rtpo_ray.types import Sample, context_hash


def make(name, context, response, weight=0.5, advantage=1.0, engine=None, rollout=""):
    return Sample(sample_id=name, context_ids=context, context_hash=context_hash(context), response_ids=response,
                  engine_logprobs=engine or [-0.5] * len(response), advantage=advantage, weight=weight, rollout_id=rollout)


def many(count, seed=0):
    rng = random.Random(seed)
    return [make(f"s{i:03d}", [1] * rng.randint(1, 20), [2] * rng.randint(1, 9)) for i in range(count)]


def test_collate_values():
    batch = collate_padded([make("a", [5, 6, 7], [8, 9], 0.5, 2.0, [-0.1, -0.2]), make("b", [4], [3], 0.25, -1.0, [-0.3])])
    assert batch.sample_ids == ("a", "b")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.columns.tolist() == [2, 3, 0]  # the logits at a position predict the next token
    assert batch.targets.tolist() == [8, 9, 3]
    assert batch.input_ids[batch.rows, batch.columns + 1].tolist() == batch.targets.tolist() and batch.layout is None
    assert batch.weights.tolist() == [0.25, 0.25, 0.25]  # weight / T: .5 / 2, .5 / 2, .25 / 1
    assert batch.advantages.tolist() == [2.0, 2.0, -1.0]
    assert batch.engine_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert {name: part.tolist() for name, part in batch.split(torch.tensor([1, 2, 3])).items()} == {"a": [1, 2], "b": [3]}


def test_weights_sum_to_one_a_group_whatever_the_lengths():
    group = [make("a", [1], [2] * 7, 1 / 3), make("b", [1], [2], 1 / 3), make("c", [1], [2] * 30, 1 / 3)]
    assert collate_padded(group).weights.sum().item() == pytest.approx(1.0)


def grown(name, *turns, start=(1, 2)):
    """Samples of one rollout: (response, feedback) a turn, every context being all that came before."""
    samples, context = [], list(start)
    for k, (response, feedback) in enumerate(turns):
        samples.append(make(f"{name}:{k}", list(context), list(response), engine=[-float(k + 1)] * len(response), rollout=name))
        context += [*response, *feedback]
    return samples


def test_responses_of_a_growing_rollout_share_one_sequence():
    """Two turns: context 1 2, response 3 4, feedback 5, response 6. Scored where they stand, next to a rollout of its own."""
    first, second = grown("a", ((3, 4), (5,)), ((6,), ()))
    other = make("b:0", [7], [8], rollout="b")
    assert [[one.sample_id for one in row] for row in sequences([second, other, first])] == [["b:0"], ["a:0", "a:1"]]
    batch = collate_padded([other, first, second])
    assert batch.sample_ids == ("b:0", "a:0", "a:1")
    assert batch.input_ids.tolist() == [[7, 8, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.rows.tolist() == [0, 1, 1, 1] and batch.columns.tolist() == [0, 1, 2, 4] and batch.targets.tolist() == [8, 3, 4, 6]
    assert batch.sample_index.tolist() == [0, 1, 1, 2] and batch.weights.tolist() == [0.5, 0.25, 0.25, 0.5]
    assert batch.engine_logprobs.tolist() == [-0.5, -1.0, -1.0, -2.0]
    assert {name: part.tolist() for name, part in batch.split(torch.arange(4)).items()} == {"b:0": [0], "a:0": [1, 2], "a:1": [3]}


@pytest.mark.parametrize(("case", "rows"), [
    ([make("a:0", [1, 2], [3], rollout="a"), make("a:1", [1, 2, 3], [4], rollout="a")], 1),
    ([make("a:0", [1, 2], [3], rollout="a"), make("a:1", [1, 2, 9, 9], [4], rollout="a")], 2),  # the response is not in the context
    ([make("a:0", [1, 2], [3], rollout="a"), make("a:1", [9, 2, 3, 9], [4], rollout="a")], 2),  # nor is the context
    ([make("a:0", [1, 2], [3, 4], rollout="a"), make("a:1", [1, 2, 3], [4], rollout="a")], 2),  # a part of it only
    ([make("a:0", [1, 2], [3], rollout="a"), make("b:1", [1, 2, 3], [4], rollout="b")], 2),  # another rollout
    ([make("a:0", [1, 2], [3]), make("a:1", [1, 2, 3], [4])], 2),  # of no rollout at all
])
def test_only_true_continuations_share_a_sequence(case, rows):
    assert len(sequences(case)) == rows
    batch = collate_padded(case)
    assert batch.input_ids.shape[0] == rows
    assert batch.input_ids[batch.rows, batch.columns + 1].tolist() == batch.targets.tolist()
    for number, sample in enumerate(case):
        row = batch.input_ids[batch.rows[batch.sample_index == number][0]].tolist()
        assert row[:len(sample.context_ids) + len(sample.response_ids)] == [*sample.context_ids, *sample.response_ids]


@pytest.mark.parametrize("budget", [29, 40, 64, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_plans_of_growing_rollouts_hold_every_sample_once_within_the_budget_and_waste_nothing(budget, seed):
    rng = random.Random(seed)
    samples = [one for i in range(20) for one in grown(f"r{i:02d}", *(([rng.randrange(9)] * rng.randint(1, 3), [rng.randrange(9)] * rng.randint(0, 3))
                                                                      for _ in range(rng.randint(1, 4))))]
    batches = plan_rows(rng.sample(samples, k=len(samples)), budget)
    assert sorted(one.sample_id for batch in batches for one in batch) == sorted(one.sample_id for one in samples)
    rows = 0
    for batch in batches:
        made = collate_padded(batch)
        assert made.input_ids.numel() <= budget and made.sample_ids == tuple(one.sample_id for one in batch)
        assert made.input_ids[made.rows, made.columns + 1].tolist() == made.targets.tolist()
        for name, part in made.split(made.targets).items():
            assert part.tolist() == next(one for one in samples if one.sample_id == name).response_ids
        rows += made.input_ids.shape[0]
    assert rows == 20  # one a rollout


@pytest.mark.parametrize("budget", [29, 64, 100, 1000])
def test_plan_holds_every_sample_once_within_the_budget(budget):
    samples = many(50)
    batches = plan_rows(samples, budget)
    assert sorted(s.sample_id for batch in batches for s in batch) == [s.sample_id for s in samples]
    assert all(len(batch) * max(length(s) for s in batch) <= budget for batch in batches)
    assert len(batches) > 1 or budget == 1000


def test_plan_does_not_depend_on_arrival_order():
    samples = many(30)
    shuffled = random.Random(1).sample(samples, k=30)
    assert plan_rows(shuffled, 64) == plan_rows(samples, 64)
    assert plan_rows([], 64) == []


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
