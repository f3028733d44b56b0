"""RTPO's credit against numbers worked out by hand, and the conservation of siblings."""

import itertools
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from records import RTPO, credited, failed, group, random_groups, rng_of, sibling

from pipelines.counts import count_stage
from pipelines.credit import credit_groups, samples_to_train
from pipelines.rows import SAMPLES, groups_to_table
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import AlgorithmConfig
from rtpo_ray.types import context_hash


def expectation(value_of, n, success=(1.0, 0.8), first=None):
    """E[value_of(actions, returns)] over n siblings that take one of two actions evenly and succeed with `success[action]`."""
    total = 0.0
    for actions in itertools.product((0, 1), repeat=n):
        if first is not None and actions[0] != first:
            continue
        for returns in itertools.product((0.0, 1.0), repeat=n):
            chance = math.prod(success[a] if r else 1 - success[a] for a, r in zip(actions, returns, strict=True)) / 2 ** (n - (first is not None))
            total += chance * value_of(actions, returns)
    return total


@pytest.mark.parametrize(("n", "share"), [(1, 0.0), (2, 1 / 2), (3, 2 / 3), (4, 3 / 4)])
def test_the_sibling_advantage_is_the_true_one_times_1_minus_1_over_n(n, share):
    """At R of the worked tree, b has the true advantage .8 - .9 = -.1."""
    assert expectation(lambda actions, returns: RTPO.credit(returns)[0], n, first=1) == pytest.approx(-0.1 * share, abs=1e-12)
    assert expectation(lambda actions, returns: RTPO.credit(returns)[0], n, first=0) == pytest.approx(0.1 * share, abs=1e-12)


def test_the_mean_squared_error_of_two_siblings():
    def error(actions, returns):
        return (RTPO.credit(returns)[0] - (0.1, -0.1)[actions[0]]) ** 2

    assert expectation(error, 2) == pytest.approx(0.045, abs=1e-12)
    deterministic = [(RTPO.credit([(1.0, 0.8)[a], (1.0, 0.8)[b]])[0] - (0.1, -0.1)[a]) ** 2 for a in (0, 1) for b in (0, 1)]
    assert sum(deterministic) / 4 == pytest.approx(0.005, abs=1e-12)


@pytest.mark.parametrize(("returns", "advantages"), [
    ([1, 0], [0.5, -0.5]),
    ([1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),  # GRPO would give +/-.866
    ([3, 1, 1, 1], [1.5, -0.5, -0.5, -0.5]),
    ([0.002, 0.0], [0.001, -0.001]),  # no standard deviation blows a small difference up
    ([1000, 0], [500, -500]),
    ([1, 1, 1], [0, 0, 0]),
    ([0], [0]),  # a singleton never gets A = R
])
def test_credit_by_hand(returns, advantages):
    assert RTPO.credit(returns) == pytest.approx(advantages, abs=1e-12)


@pytest.mark.parametrize(("n", "p", "expected"), [(2, 0.5, 0.5), (2, 0.1, 0.82), (3, 0.5, 0.25), (3, 0.1, 0.73)])
def test_the_zero_advantage_rate_of_the_pipeline_is_the_closed_form(n, p, expected):
    outcomes = list(itertools.product((0.0, 1.0), repeat=n))
    table = credited(*(group(*(sibling(f"g{i}/{j}", r) for j, r in enumerate(returns)), name=f"g{i}") for i, returns in enumerate(outcomes)))
    filtered = {row["group_id"] for row in table.to_pylist() if row["outcome"] == "filtered"}
    assert {row["reason"] for row in table.to_pylist()} == {"", "zero_advantage"}
    rate = sum(math.prod(p if r else 1 - p for r in returns) for i, returns in enumerate(outcomes) if f"g{i}" in filtered)
    assert rate == pytest.approx(expected) == p**n + (1 - p) ** n


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1 / 3, 1e6 + 0.1, 98765.4321, 1e-9])
@pytest.mark.parametrize("n", [2, 3, 7, 11])
def test_equal_returns_are_filtered_whatever_rounding_does(value, n):
    rows = credited(group(*(sibling(f"s{i}", value) for i in range(n)))).to_pylist()
    assert [(row["outcome"], row["reason"]) for row in rows] == [("filtered", "zero_advantage")] * n


def test_a_small_difference_is_not_rounding():
    assert credited(group(sibling("a", 1e-6), sibling("b", 0.0)))["outcome"].to_pylist() == ["trained"] * 2


def test_returns_are_those_of_the_whole_continuation():
    rows = credited(group(sibling("a", 0.5, 0.0, 1.0), sibling("b", 0.5))).to_pylist()
    assert [(row["return"], row["advantage"], row["turns"], row["generated_tokens"]) for row in rows] == [(1.5, 0.5, 3, 6), (0.5, -0.5, 1, 2)]


def test_a_failed_sibling_fails_its_group_and_no_other():
    table = credited(
        group(sibling("a/0", 1.0), failed("a/1", "EngineError: lost"), failed("a/2", "KeyError: later"), name="a"),
        group(sibling("b/0", 1.0), sibling("b/1", 0.0), name="b"))
    assert [(row["sample_id"], row["outcome"], row["reason"], row["advantage"], row["context_ids"]) for row in table.to_pylist()] == [
        *((f"a/{j}", "failed", "EngineError: lost", 0.0, []) for j in range(3)),
        ("b/0", "trained", "", 0.5, [1, 2, 3]), ("b/1", "trained", "", -0.5, [1, 2, 3])]


def test_a_failure_without_a_message_is_still_one():
    rows = credited(group(sibling("a", 1.0), failed("b", ""))).to_pylist()
    assert [(row["outcome"], row["reason"]) for row in rows] == [("failed", "failed without a message")] * 2


def test_overlong_boundaries_are_filtered_and_overlong_continuations_are_not():
    rows = credited(
        group(sibling("a/0", end="overlong"), sibling("a/1", end="overlong"), name="a"),
        group(sibling("b/0", 0.0, end="overlong"), sibling("b/1", 1.0), name="b")).to_pylist()
    assert [(row["outcome"], row["reason"]) for row in rows] == [("filtered", "overlong")] * 2 + [("trained", "")] * 2


def test_credit_that_drops_a_sibling_is_refused():
    with pytest.raises(ValueError, match="group t/0/0: credit gave 1 advantages for 2 siblings"):
        credit_groups(groups_to_table([group(sibling("a", 1.0), sibling("b", 0.0))]), credit=lambda returns: [0.0])


@pytest.mark.parametrize("seed", range(20))
def test_every_sibling_comes_out_once_with_one_outcome(seed):
    groups = random_groups(rng_of(seed))
    table = credited(*groups)
    assert table.schema == SAMPLES
    assert table["sample_id"].to_pylist() == [one.rollout_id for made in groups for one in made.siblings]
    counts = count_stage(table)
    assert counts.trained + counts.filtered.total() + counts.failed.total() == counts.siblings == len(table)
    assert len(samples_to_train(table)) == counts.trained
    by_group = Counter((row["group_id"], row["outcome"]) for row in table.to_pylist())
    assert len({name for name, _ in by_group}) == len(by_group)  # a group has one outcome
    for made in groups:
        rows = [row for row in table.to_pylist() if row["group_id"] == made.group_id]
        assert sum(row["weight"] for row in rows) == pytest.approx(1.0)
        assert sum(row["advantage"] for row in rows) == pytest.approx(0.0)


def test_samples_to_train_are_the_records_themselves():
    groups = [group(sibling("a/0", 1.0, 0.0), sibling("a/1", 0.0), name="a"), group(sibling("b/0", 1.0), sibling("b/1", 1.0), name="b"),
              group(sibling("c/0", 0.0), sibling("c/1", 0.0), sibling("c/2", 3.0), name="c")]
    tables = [credited(made) for made in groups]
    whole = pa.concat_tables(tables)  # several chunks, as blocks arrive
    samples = samples_to_train(whole)
    assert [sample.sample_id for sample in samples] == ["a/0", "a/1", "c/0", "c/1", "c/2"]
    firsts = {one.rollout_id: one.turns[0] for made in groups for one in made.siblings}
    for sample in samples:
        first = firsts[sample.sample_id]
        assert (tuple(sample.context_ids), tuple(sample.response_ids)) == (first.context_ids, first.response_ids)
        assert tuple(sample.engine_logprobs) == first.engine_logprobs
        assert sample.context_hash == first.context_hash == context_hash(sample.context_ids)
        assert all(isinstance(array, np.ndarray) for array in (sample.context_ids, sample.response_ids, sample.engine_logprobs))
    assert [(sample.advantage, sample.weight) for sample in samples] == [(0.5, 0.5), (-0.5, 0.5), (-1.0, 1 / 3), (-1.0, 1 / 3), (2.0, 1 / 3)]


def test_nothing_to_train_is_no_samples():
    assert samples_to_train(SAMPLES.empty_table()) == []
    assert samples_to_train(credited(group(sibling("a", 1.0), sibling("b", 1.0)))) == []
    assert credited().schema == SAMPLES


def test_stages_run_from_the_last_turn_to_the_first():
    algorithm = algorithms.build(AlgorithmConfig(n_siblings=3, n_trunks=4, clip_low=0.1, clip_high=0.3, epochs=2, minibatches=5))
    assert algorithm.stages(3) == [Stage(turn=2, n_siblings=3), Stage(turn=1, n_siblings=3), Stage(turn=0, n_siblings=3)]
    assert algorithm.n_trunks == 4
    objective = algorithm.objective
    assert (objective.clip_low, objective.clip_high, objective.epochs, objective.minibatches) == (0.1, 0.3, 2, 5)
