"""RTPO's credit against numbers worked out by hand, the rows that come of credit, and the conservation of siblings."""

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from records import RTPO, credited, failed, group, random_groups, rng_of, sibling, trunk, turn_record

from pipelines.counts import count_stage
from pipelines.credit import samples_to_train
from pipelines.rows import SAMPLES
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Credit
from rtpo_ray.algorithms.rtpo import Rtpo
from rtpo_ray.errors import MethodError
from rtpo_ray.types import Rollout, context_hash


def advantages(returns):
    """RTPO's, of siblings with these returns."""
    return [credit.advantage for credit in RTPO.credit(group(*(sibling(f"s{i}", value) for i, value in enumerate(returns))))]


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
    assert expectation(lambda actions, returns: advantages(returns)[0], n, first=1) == pytest.approx(-0.1 * share, abs=1e-12)
    assert expectation(lambda actions, returns: advantages(returns)[0], n, first=0) == pytest.approx(0.1 * share, abs=1e-12)


def test_the_mean_squared_error_of_two_siblings():
    def error(actions, returns):
        return (advantages(returns)[0] - (0.1, -0.1)[actions[0]]) ** 2

    assert expectation(error, 2) == pytest.approx(0.045, abs=1e-12)
    deterministic = [(advantages([(1.0, 0.8)[a], (1.0, 0.8)[b]])[0] - (0.1, -0.1)[a]) ** 2 for a in (0, 1) for b in (0, 1)]
    assert sum(deterministic) / 4 == pytest.approx(0.005, abs=1e-12)


@pytest.mark.parametrize(("returns", "expected"), [
    ([1, 0], [0.5, -0.5]),
    ([1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),  # GRPO would give +/-.866
    ([3, 1, 1, 1], [1.5, -0.5, -0.5, -0.5]),
    ([0.002, 0.0], [0.001, -0.001]),  # no standard deviation blows a small difference up
    ([1000, 0], [500, -500]),
    ([1, 1, 1], [0, 0, 0]),
    ([0], [0]),  # a singleton never gets A = R
])
def test_credit_by_hand(returns, expected):
    assert advantages(returns) == pytest.approx(expected, abs=1e-12)


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
        ("b/0:0", "trained", "", 0.5, [1, 2, 3]), ("b/1:0", "trained", "", -0.5, [1, 2, 3])]


def test_a_failure_without_a_message_is_still_one():
    rows = credited(group(sibling("a", 1.0), failed("b", ""))).to_pylist()
    assert [(row["outcome"], row["reason"]) for row in rows] == [("failed", "failed without a message")] * 2


def test_overlong_boundaries_are_filtered_and_overlong_continuations_are_not():
    rows = credited(
        group(sibling("a/0", end="overlong"), sibling("a/1", end="overlong"), name="a"),
        group(sibling("b/0", 0.0, end="overlong"), sibling("b/1", 1.0), name="b")).to_pylist()
    assert [(row["outcome"], row["reason"]) for row in rows] == [("filtered", "overlong")] * 2 + [("trained", "")] * 2


def test_a_sibling_without_credit_is_counted_all_the_same():
    class Forgetful(Rtpo):
        def credit(self, group):
            return super().credit(group)[:1]

    table = credited(group(sibling("a", 1.0), sibling("b", 0.0)), algorithm=Forgetful())
    assert [(row["sample_id"], row["outcome"], row["reason"], row["first"]) for row in table.to_pylist()] == [
        ("a:0", "trained", "", True), ("b", "filtered", "uncredited", True)]
    counts = count_stage(table)
    assert (counts.siblings, counts.trained, counts.filtered, counts.groups, counts.comparable) == (2, 1, Counter(uncredited=1), 1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_every_sibling_comes_out_once_with_one_outcome(seed):
    groups = random_groups(rng_of(seed))
    table = credited(*groups)
    assert table.schema == SAMPLES
    assert table["rollout_id"].to_pylist() == [one.rollout_id for made in groups for one in made.siblings]
    names = [row["sample_id"].removesuffix(":0" if row["outcome"] == "trained" else "") for row in table.to_pylist()]
    assert names == table["rollout_id"].to_pylist()
    counts = count_stage(table)
    assert counts.trained + counts.filtered.total() + counts.failed.total() == counts.siblings == len(table)
    assert len(samples_to_train(table)) == counts.trained
    by_group = Counter((row["group_id"], row["outcome"]) for row in table.to_pylist())
    assert len({name for name, _ in by_group}) == len(by_group)  # a group has one outcome
    for made in groups:
        rows = [row for row in table.to_pylist() if row["group_id"] == made.group_id]
        assert sum(row["weight"] for row in rows) == pytest.approx(float(rows[0]["outcome"] == "trained"))
        assert sum(row["advantage"] for row in rows) == pytest.approx(0.0)


def test_samples_to_train_are_the_records_themselves():
    groups = [group(sibling("a/0", 1.0, 0.0), sibling("a/1", 0.0), name="a"), group(sibling("b/0", 1.0), sibling("b/1", 1.0), name="b"),
              group(sibling("c/0", 0.0), sibling("c/1", 0.0), sibling("c/2", 3.0), name="c")]
    tables = [credited(made) for made in groups]
    whole = pa.concat_tables(tables)  # several chunks, as blocks arrive
    samples = samples_to_train(whole)
    assert [sample.sample_id for sample in samples] == ["a/0:0", "a/1:0", "c/0:0", "c/1:0", "c/2:0"]
    firsts = {one.rollout_id: one.turns[0] for made in groups for one in made.siblings}
    for sample in samples:
        first = firsts[sample.rollout_id]
        assert (tuple(sample.context_ids), tuple(sample.response_ids)) == (first.context_ids, first.response_ids)
        assert tuple(sample.engine_logprobs) == first.engine_logprobs
        assert sample.context_hash == first.context_hash == context_hash(sample.context_ids)
        assert all(isinstance(array, np.ndarray) for array in (sample.context_ids, sample.response_ids, sample.engine_logprobs))
    assert [(sample.advantage, sample.weight) for sample in samples] == [(0.5, 0.5), (-0.5, 0.5), (-1.0, 1 / 3), (-1.0, 1 / 3), (2.0, 1 / 3)]


def test_nothing_to_train_is_no_samples():
    assert samples_to_train(SAMPLES.empty_table()) == []
    assert samples_to_train(credited(group(sibling("a", 1.0), sibling("b", 1.0)))) == []
    assert credited().schema == SAMPLES


# --- rows of methods with several records a sibling


def make_group(*siblings):
    return group(*siblings, name="t", turn=None)


def test_one_row_a_response_and_one_first_row_a_sibling():
    """Four trunks of ragged length under GRPO: what is counted by rollout stands in its first row only."""
    made = make_group(*(trunk(f"t/{i}", *rewards) for i, rewards in enumerate([(0, 0, 1.0), (0,), (0.5, 0), (0,)])))
    table = credited(made, algorithm=algorithms.make("grpo", {}))
    rows = table.to_pylist()
    assert [(row["sample_id"], row["first"], row["turn"], row["reward"], row["return"], row["turns"]) for row in rows] == [
        ("t/0:0", True, 0, 0.0, 1.0, 3), ("t/0:1", False, 1, 0.0, 1.0, 3), ("t/0:2", False, 2, 1.0, 1.0, 3), ("t/1:0", True, 0, 0.0, 0.0, 1),
        ("t/2:0", True, 0, 0.5, 0.5, 2), ("t/2:1", False, 1, 0.0, 0.5, 2), ("t/3:0", True, 0, 0.0, 0.0, 1)]
    assert sum(row["weight"] for row in rows) == pytest.approx(1.0)
    assert [row["generated_tokens"] for row in rows] == [0] * 7  # trunks are counted where they were made
    counts = count_stage(table)
    assert (counts.siblings, counts.trained, counts.comparable, counts.groups, counts.informative_groups, counts.successes) == (4, 4, 4, 1, 1, 2)
    samples = samples_to_train(table)
    assert [(one.sample_id, one.rollout_id, one.group_id, one.turn, one.reward) for one in samples] == [
        (row["sample_id"], row["rollout_id"], "t", row["turn"], row["reward"]) for row in rows]
    assert [tuple(one.context_ids) for one in samples[:3]] == [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("name", "make_args"), [("treegrpo", {}), ("arpo", {}), ("grpo", {"kl_coef": 0.1}), ("ppo", {}), ("seeupo", {})])
@pytest.mark.parametrize("seed", range(5))
def test_ids_are_unique_and_first_is_once_a_sibling_whatever_the_method(name, make_args, seed):
    rng = rng_of(seed)
    groups = []
    for task in ("a", "b"):
        trunks = [trunk(f"{task}/{i}", *(rng.choice((0.0, 1.0)) for _ in range(rng.randint(1, 4)))) for i in range(3)]
        grown = [sibling(f"{one.rollout_id}/{turn}/{j}", rng.choice((0.0, 1.0)), 0.0, turn=turn, parent=one.rollout_id)
                 for one in trunks for turn in range(len(one.turns)) for j in range(2)]
        members = [*trunks, *grown] if name in ("treegrpo", "arpo") else trunks
        groups.append(group(*members, name=task, turn=None))
    rows = credited(*groups, algorithm=algorithms.make(name, make_args)).to_pylist()
    assert len({row["sample_id"] for row in rows}) == len(rows)
    assert Counter(row["rollout_id"] for row in rows if row["first"]) == Counter({one.rollout_id: 1 for made in groups for one in made.siblings})
    for made in groups:  # every response of the chain, once
        for one in made.siblings:
            trained = [row["turn"] for row in rows if row["rollout_id"] == one.rollout_id and row["outcome"] == "trained"]
            assert trained in ([], list(range(one.turns[-1].turn + 1)))


def test_a_summary_of_the_turn_has_a_row_of_its_own():
    turns = (turn_record(1, (1, 2), (7, 8, 9), reward=0.0), turn_record(1, (1, 2, 7), (5,), kind="summary"), turn_record(2, (1, 5), (6,), reward=1.0))
    one = Rollout(rollout_id="a", task_id="t", turns=turns, parent="t/0")
    rows = credited(group(one, sibling("b", 0.0, turn=1), turn=1)).to_pylist()
    assert [(row["sample_id"], row["first"], row["advantage"], row["weight"], row["generated_tokens"]) for row in rows] == [
        ("a:1", True, 0.5, 0.375, 5), ("a:1s", False, 0.5, 0.125, 0), ("b:1", True, -0.5, 0.5, 2)]
    assert rows[1]["response_ids"] == [5] and rows[1]["context_ids"] == [1, 2, 7]


@pytest.mark.parametrize(("name", "args", "kept"), [
    ("rtpo", {}, False), ("rtpo", {"kl_coef": 0.1}, True), ("rtpo", {"sync_every": 0, "rho_min": 0.5, "rho_max": 2.0}, True), ("grpo", {}, False),
    ("grpo", {"kl_coef": 0.1}, True), ("dapo", {}, False), ("ppo", {}, True), ("gspo", {}, False), ("seeupo", {}, False), ("refuel", {}, False),
    ("refuel", {"epochs": 2}, True), ("refuel", {"minibatches": 2}, True)])
def test_groups_of_equal_returns_reach_the_learner_when_they_still_send_a_gradient(name, args, kept):
    table = credited(group(trunk("a", 1.0), trunk("b", 1.0)), algorithm=algorithms.make(name, args))
    assert table["outcome"].to_pylist() == ["trained" if kept else "filtered"] * 2
    counts = count_stage(table)
    assert (counts.groups, counts.informative_groups, counts.comparable, counts.siblings) == (1, 0, 2, 2)
    assert (counts.trained, counts.filtered.total()) == ((2, 0) if kept else (0, 2))


def test_what_follows_the_turn_is_scored_when_it_must_be_weighed():
    clamped = algorithms.make("rtpo", {"sync_every": 0, "rho_min": 0.5, "rho_max": 2.0})
    made = group(sibling("a", 0.25, 0.0, 1.0, turn=1), sibling("b", 0.0, turn=1), turn=1)
    table = credited(made, algorithm=clamped)
    assert [(row["sample_id"], row["first"], row["turn"], row["reward"], row["advantage"], row["weight"]) for row in table.to_pylist()] == [
        ("a:1", True, 1, 0.25, 0.625, 0.5), ("a:2", False, 2, 0.0, 0.0, 0.0), ("a:3", False, 3, 1.0, 0.0, 0.0), ("b:1", True, 1, 0.0, -0.625, 0.5)]
    counts = count_stage(table)
    assert (counts.siblings, counts.trained, counts.comparable) == (2, 2, 2)
    assert [row["sample_id"] for row in credited(made).to_pylist()] == ["a:1", "b:1"]  # on-policy continuations need no weight


def test_the_learner_may_score_a_response_in_another_context():
    turns = (turn_record(0, (1, 2), (3,), reward=1.0, train_context_ids=(9, 8, 7)), turn_record(1, (4,), (5,)))
    one = Rollout(rollout_id="a", task_id="t", turns=turns, parent="t/0")
    first, second = samples_to_train(credited(group(one, sibling("b", 0.0))))
    assert (tuple(first.context_ids), first.context_hash) == ((9, 8, 7), context_hash((9, 8, 7)))
    assert (tuple(second.context_ids), second.context_hash) == ((1, 2, 3), context_hash((1, 2, 3)))


def test_credit_of_the_base_must_be_defined():
    class Nothing(algorithms.Algorithm):
        pass

    with pytest.raises(TypeError, match=r"Nothing must define credit\(group\)"):
        Nothing().credit(group(sibling("a", 1.0)))
    assert Credit(0, turn_record(), 1.0, 0.5) == Credit(0, turn_record(), 1.0, 0.5)


@pytest.mark.parametrize(("change", "message"), [
    ({"advantage": math.nan}, r"group g, sibling 0, turn 0: Odd.credit gave the advantage nan; expected a finite number"),
    ({"weight": 0.0}, r"group g, sibling 0, turn 0: Odd.credit gave the weight 0.0; expected a finite number above 0"),
    ({"weight": math.inf}, r"credit gave the weight inf"), ({"weight": -1.0}, r"credit gave the weight -1.0"),
    ({"sibling": 2}, r"group g: Odd.credit names sibling 2, which is not there; expected 0 to 1"),
    ({"sibling": -1}, r"sibling -1"), ({"sibling": 1}, r"Odd.credit gave a record that is neither this sibling's nor its trunk's")])
def test_credit_that_could_only_be_trained_wrongly_is_refused(change, message):
    class Odd(type(algorithms.make("rtpo", {}))):
        def credit(self, made):
            first, *others = super().credit(made)
            return [dataclasses.replace(first, **change), *others]

    with pytest.raises(MethodError, match=message):
        credited(group(sibling("g/0", 1.0), sibling("g/1", 0.0), name="g"), algorithm=Odd())


@pytest.mark.parametrize(("answer", "message"), [
    (lambda: None, r"group g of 2 siblings: Odd\.credit raised TypeError: 'NoneType' object is not iterable"),
    (lambda: 1 / 0, r"group g of 2 siblings: Odd\.credit raised ZeroDivisionError: division by zero"),
    (lambda: [1.0, 0.0], r"group g: Odd\.credit returned 1\.0; expected a sequence of Credit")])
def test_a_credit_function_that_fails_is_named(answer, message):
    class Odd(algorithms.Algorithm):
        def credit(self, made):
            return answer()

    with pytest.raises(MethodError, match=message):
        credited(group(sibling("g/0", 1.0), sibling("g/1", 0.0), name="g"), algorithm=Odd())


def test_a_credit_function_may_yield():
    class Lazy(type(algorithms.make("rtpo", {}))):
        def credit(self, made):
            yield from super().credit(made)

    made = group(sibling("g/0", 1.0), sibling("g/1", 0.0), name="g")
    found, expected = credited(made, algorithm=Lazy()), credited(made)
    assert found.drop_columns("credit_seconds") == expected.drop_columns("credit_seconds") and "trained" in found["outcome"].to_pylist()
