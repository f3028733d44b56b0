"""Samples as packed forests: every prefix once, every token sees its ancestors and itself, and plans do not depend on the order."""

import random

import pytest
import torch

from rtpo_ray.policy import forest
from rtpo_ray.policy.batching import collate_packed, plan
from rtpo_ray.policy.forest import distinct_tokens, in_prefix_order, pack, plan_micro_batches
from rtpo_ray.types import Sample, context_hash


def make(name, context, response, group="", engine=None):
    return Sample(sample_id=name, context_ids=context, context_hash=context_hash(context), response_ids=response,
                  engine_logprobs=engine or [-0.5] * len(response), advantage=1.0, weight=0.5, group_id=group)


def forest_of(seed, groups=6):
    """Groups with a common stem, of siblings and of rollouts that grow, some of whose tokens agree; and samples that repeat or begin others."""
    rng, found = random.Random(seed), [make("a", [5, 6], [7, 8]), make("b", [5, 6], [7, 8]), make("c", [5], [6]), make("d", [5, 6, 7], [8, 9])]
    for g in range(groups):
        start = [1, 2] + [rng.randrange(50) for _ in range(rng.randint(0, 40))]
        for j in range(rng.randint(1, 5)):
            context = list(start)
            for t in range(rng.randint(1, 3)):
                response = [rng.randrange(rng.choice((2, 50))) for _ in range(rng.randint(1, 25))]
                found.append(make(f"{g}/{j}/{t}", list(context), response, f"g{g}"))
                context += response + [rng.randrange(50) for _ in range(rng.randint(0, 4))]
    return found


def prefixes(samples):
    return {tuple([*s.context_ids, *s.response_ids][:end]) for s in samples for end in range(1, len(s.context_ids) + len(s.response_ids))}


def seen(layout):
    """Per token: the set of tokens whose keys it gets, by what the calls compute."""
    found, rows, at_query, at_key = {}, [], 0, 0
    for call in layout.calls:
        for block in range(call.blocks):
            keys = layout.keys[at_key : at_key + call.keys].tolist()
            mask = torch.ones(call.queries, call.keys).tril().bool() if call.mask is None else call.mask[block, 0]
            rows += [[keys[column] for column in mask[row].nonzero()[:, 0].tolist()] for row in range(call.queries)]
            at_query, at_key = at_query + call.queries, at_key + call.keys
    assert at_query == len(rows) == len(layout.queries) and at_key == len(layout.keys)
    for token, row in enumerate(layout.back.tolist()):
        assert layout.queries[row] == token and len(rows[row]) == len(set(rows[row]))
        found[token] = set(rows[row])
    return found


def test_siblings_by_hand():
    """Context 5 6; responses 7 8 9, 7 4 and 2: the 7 that two of them begin with is there, and scored, once."""
    samples = [make("x", [5, 6], [7, 8, 9], engine=[-1.0, -2.0, -3.0]), make("y", [5, 6], [7, 4], engine=[-4.0, -5.0]), make("z", [5, 6], [2])]
    batch = collate_packed(in_prefix_order(samples))
    assert batch.sample_ids == ("z", "y", "x")  # 5 6 | 5 6 7 | 5 6 7 8, without what predicts nothing
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]] and batch.layout.positions.tolist() == [[0, 1, 2, 3]]
    assert batch.columns.tolist() == [1, 1, 2, 2, 3] and batch.labels.tolist() == [2, 7, 4, 8, 9] and batch.rows.tolist() == [0] * 5
    assert batch.scored.tolist() == [0, 1, 2, 1, 3, 4] and batch.targets.tolist() == [2, 7, 4, 7, 8, 9]
    assert batch.engine_logprobs.tolist() == [-0.5, -4.0, -5.0, -1.0, -2.0, -3.0] and batch.sample_index.tolist() == [0, 1, 1, 2, 2, 2]
    assert batch.weights.tolist() == pytest.approx([0.5, 0.25, 0.25, 1 / 6, 1 / 6, 1 / 6])
    assert {name: part.tolist() for name, part in batch.split(torch.arange(6)).items()} == {"z": [0], "y": [1, 2], "x": [3, 4, 5]}


@pytest.mark.parametrize(("waste", "free"), [(forest._WASTE, forest._FREE), (1.5, 0), (1.0, 300)])
@pytest.mark.parametrize("seed", range(4))
def test_every_prefix_is_there_once_and_sees_its_ancestors(monkeypatch, seed, waste, free):
    monkeypatch.setattr(forest, "_WASTE", waste)
    monkeypatch.setattr(forest, "_FREE", free)
    samples = forest_of(seed)
    placed = in_prefix_order(samples)
    packed = pack(placed)
    tokens, depth = packed.input_ids.tolist(), packed.layout.positions[0].tolist()
    ancestors = seen(packed.layout)
    prefix = {token: tuple(tokens[each] for each in sorted(ancestors[token])) for token in range(len(tokens))}
    assert all(max(keys) == token and [depth[key] for key in sorted(keys)] == list(range(depth[token] + 1)) for token, keys in ancestors.items())
    assert len(prefix) == distinct_tokens(placed) and set(prefix.values()) == prefixes(samples)
    expected = [((*s.context_ids, *s.response_ids[:t]), token) for s in (item.sample for item in placed) for t, token in enumerate(s.response_ids)]
    assert [(prefix[packed.columns[n]], packed.labels[n]) for n in packed.scored.tolist()] == expected
    assert len(packed.labels) == len(set(expected))  # each is scored once
    kinds = {call.mask is None for call in packed.layout.calls}
    assert kinds == {True, False} or free == forest._FREE
    assert all(mask.any(-1).all() for mask in (call.mask for call in packed.layout.calls) if mask is not None)


def test_long_runs_are_causal_and_short_siblings_share_a_mask():
    rng = random.Random(0)
    context = [rng.randrange(9) for _ in range(1024)]
    calls = pack(in_prefix_order([make(str(j), context, [10 + j] + [rng.randrange(9) for _ in range(64)]) for j in range(8)])).layout.calls
    assert [(call.blocks, call.queries, call.keys, call.mask is None) for call in calls] == [(1, 448, 1472, False), (1, 1088, 1088, True)]
    chains = pack(in_prefix_order([make(str(j), context[:100], [10 + j] + context[: 400 + j]) for j in range(8)])).layout.calls
    assert [(call.blocks, call.queries, call.mask is None) for call in chains] == [(8, 507, True)]


@pytest.mark.parametrize("budget", [100, 150, 400, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_plans_hold_every_sample_once_within_the_budget_whatever_the_order(budget, share):
    samples = forest_of(7)
    found = plan(samples, budget, packed=True, share=share)
    shuffled = plan(random.Random(1).sample(samples, k=len(samples)), budget, packed=True, share=share)
    made, again = ([make_batch() for make_batch in each] for each in (found, shuffled))
    assert [batch.sample_ids for batch in made] == [batch.sample_ids for batch in again]
    assert sorted(name for batch in made for name in batch.sample_ids) == sorted(s.sample_id for s in samples)
    assert [batch.unique_tokens for batch in made] == [len(prefixes(samples))] + [0] * (len(made) - 1)
    by_id = {s.sample_id: s for s in samples}
    for batch in made:
        mine = [by_id[name] for name in batch.sample_ids]
        alone = sum(len(s.context_ids) + len(s.response_ids) - 1 for s in mine)
        assert batch.input_ids.numel() == (len(prefixes(mine)) if share else alone) <= budget
        assert {name: part.tolist() for name, part in batch.split(batch.targets).items()} == {s.sample_id: s.response_ids for s in mine}
    assert len(made) > 1 or budget == 10_000


def test_a_group_that_fits_is_not_torn_apart():
    samples = [make(f"{g}/{j}", [g] * 20, [60 + j] * 10, f"g{g}") for g in range(5) for j in range(4)]  # 20 + 4 x 9 distinct tokens each
    for budget, expected in ((120, [8, 8, 4]), (56, [4] * 5), (40, [2, 2] * 5)):
        batches = plan_micro_batches(in_prefix_order(samples), budget)
        assert [len(batch) for batch in batches] == expected
        assert all(len({item.sample.group_id for item in batch}) <= (2 if budget == 120 else 1) for batch in batches)
