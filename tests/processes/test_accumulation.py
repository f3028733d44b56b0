"""A gradient that is added up while samples come equals the one that is computed at the end."""

import math
from dataclasses import replace

import numpy as np
import pytest
from gloo import learner_config, run_ranks, tiny_model
from test_learner import N_GROUPS, N_ROLLOUTS, build, expected_gradient, flat, make_samples, parameters, same

from rtpo_ray.errors import ContextMismatch
from rtpo_ray.types import context_hash


def in_parts(rank, world, model, parts, changes=None):
    """One update whose samples come in `parts`, [part][rank] lists of samples; (result, whether parameters waited for it, what it changed)."""
    learner = build(model, learner_config(micro_batch_tokens=40), **(changes or {}))
    before = parameters(learner)
    for part in parts[:-1]:
        learner.accumulate(part[rank])
    waited = parameters(learner)
    result = learner.update(parts[-1][rank], N_GROUPS, N_ROLLOUTS, seed=5)
    after = parameters(learner)
    return result, all((waited[name] == before[name]).all() for name in before), {name: before[name] - after[name] for name in before}


def broken(rank, world, model, good, cases):
    """For every case: parts that are accumulated until one raises, then an update on `good`: (error, what the update changed)."""
    learner, found = build(model), []
    for parts in cases:
        message = ""
        try:
            for part in parts:
                learner.accumulate(part)
        except (ContextMismatch, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
        before = parameters(learner)
        learner.update(good, N_GROUPS, N_ROLLOUTS, seed=5)
        after = parameters(learner)
        found.append((message, {name: before[name] - after[name] for name in before}))
    return found


def abandoned(rank, world, model, samples, path):
    """An accumulated gradient is forgotten when a checkpoint is loaded."""
    learner = build(model)
    learner.save_checkpoint(path)
    learner.accumulate(samples[:4])
    learner.load_checkpoint(path)
    before = parameters(learner)
    result = learner.update(samples, N_GROUPS, N_ROLLOUTS, seed=5)
    after = parameters(learner)
    return result.tokens, {name: before[name] - after[name] for name in before}


def not_finite(rank, world, model, good, bad):
    learner = build(model)
    learner.accumulate(bad)
    first = learner.update(good, N_GROUPS, N_ROLLOUTS, seed=5)
    return first.refused, first.optimizer_steps, learner.update(good, N_GROUPS, N_ROLLOUTS, seed=5).optimizer_steps


PARTS = {1: [[slice(0, 3)], [slice(3, 3)], [slice(3, 7)], [slice(7, 8)]],
         2: [[slice(0, 3), slice(3, 3)], [slice(3, 4), slice(4, 8)], [slice(8, 8)] * 2]}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mean_over", ["groups", "weights"])
def test_parts_have_the_gradient_of_the_whole(world, mean_over):
    samples = make_samples()
    gradient = expected_gradient(samples)
    if mean_over == "weights":
        gradient = {name: value * N_GROUPS / sum(s.weight for s in samples) for name, value in gradient.items()}
    parts = [[samples[share] for share in part] for part in PARTS[world]]
    for result, waited, delta in run_ranks(world, in_parts, tiny_model(), parts, {"mean_over": mean_over}):
        same(delta, gradient)
        assert waited and result.tokens == sum(len(s.response_ids) for s in samples)
        denominator = N_GROUPS if mean_over == "groups" else sum(s.weight for s in samples)
        assert result.loss == pytest.approx(-sum(s.weight * s.advantage for s in samples) / denominator, rel=1e-5)
        assert result.grad_norm == pytest.approx(float(np.linalg.norm(flat(gradient))), rel=1e-4)
        assert (result.optimizer_steps, result.logprob_gap_max) == (1, pytest.approx(0.01, rel=1e-3))


def test_a_part_that_is_refused_leaves_nothing_of_the_gradient_before_it():
    good = make_samples()
    lost = replace(good[1], context_ids=[*good[1].context_ids, 1])
    other = replace(good[0], sample_id="other", context_ids=[1, 2], context_hash=context_hash([1, 2]))
    cases = [[[other], [good[0], lost]], [[good[0]], [other], [good[0]]]]
    (first, delta), (second, again) = run_ranks(1, broken, tiny_model(), good, cases)[0]
    assert first.startswith("ContextMismatch: sample s1") and second == "ValueError: samples s0 came more than once, expected every sample id once"
    same(delta, expected_gradient(good))
    assert np.linalg.norm(flat(again)) > 0


def test_a_loaded_checkpoint_forgets_what_was_accumulated(tmp_path):
    samples = make_samples()
    tokens, delta = run_ranks(1, abandoned, tiny_model(), samples, str(tmp_path / "state"))[0]
    assert tokens == sum(len(s.response_ids) for s in samples)
    same(delta, expected_gradient(samples))


def test_a_part_that_is_not_finite_refuses_the_whole_step_by_name():
    good = make_samples()
    bad = replace(good[0], sample_id="bad", advantage=math.nan)
    assert run_ranks(1, not_finite, tiny_model(), good, [bad])[0] == ("samples bad", 0, 1)
