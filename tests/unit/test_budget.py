"""Pilots and what follows them: the rule, the requests, the credit, and what a stage then counts."""

import random
from dataclasses import replace

import pytest
from records import credited, group, sibling, trunk

from pipelines import branching, counts, credit, rows
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Branch, Stage
from rtpo_ray.algorithms.budget import chance_of_more, is_extended, share_of
from rtpo_ray.theory import facts_credit, lab

ADAPTIVE = {"sibling_budget": "adaptive", "n_siblings": 6, "pilots": 2, "explore": 0.25}
PIPELINE = lab.Pipeline(rows=rows, branching=branching, credit=credit, counts=counts)


def make(**args):
    made = algorithms.make("rtpo", {**ADAPTIVE, **args})
    made.check(max_turns=3)
    return made


def members(*returns, pilots=2, chance=1.0, name="t/0/0"):
    made = group(*(sibling(f"{name}/{index}", value) for index, value in enumerate(returns)), name=name)
    return replace(made, pilots=pilots, chance=chance)


# --- the rule


@pytest.mark.parametrize(("returns", "chance"), [
    ((0.0, 0.0), 0.3), ((1.0, 1.0, 1.0), 0.3), ((0.0, 1.0), 1.0), ((0.5, 0.5, 0.25), 1.0), ((-2.0,), 0.3), ((0.5, 0.5 + 1e-9), 1.0)])
def test_pilots_that_differ_are_always_followed_and_others_by_chance(returns, chance):
    assert chance_of_more(returns, 0.3) == chance


@pytest.mark.parametrize("explore", [0.0, 0.2, 0.7, 1.0])
def test_the_coin_falls_as_often_as_it_is_said_to_and_never_twice_otherwise(explore):
    drawn = [is_extended((1.0, 1.0), explore, seed) for seed in range(4000)]
    assert abs(sum(drawn) - 4000 * explore) <= 5 * (4000 * explore * (1 - explore)) ** 0.5
    assert drawn == [is_extended((1.0, 1.0), explore, seed) for seed in range(4000)]
    assert all(is_extended((1.0, 0.0), explore, seed) for seed in range(100))


def test_a_group_weighs_the_inverse_of_its_chance_or_nothing():
    assert share_of(members(0.0, 1.0, 1.0, pilots=0)) == 1.0
    assert share_of(members(0.0, 1.0, 1.0)) == 1.0
    assert share_of(members(0.0, 0.0, 1.0, chance=0.25)) == 4.0
    assert share_of(members(0.0, 0.0, chance=0.25)) == 0.0


# --- the method


def test_stages_say_how_many_siblings_a_boundary_may_have():
    stages = make().stages(3)
    assert [stage.turn for stage in stages] == [2, 1, 0]
    assert {(stage.pilots, stage.explore, stage.siblings_a_boundary) for stage in stages} == {(2, 0.25, (2, 6))}
    fixed = algorithms.make("rtpo", {"n_siblings": 6}).stages(3)
    assert {(stage.pilots, stage.siblings_a_boundary) for stage in fixed} == {(0, (6, 6))}


def test_requests_ask_for_pilots_and_say_what_may_follow():
    method, trunks = make(pilots=3), rows.rollouts_to_table([trunk("t/0", 0.0, 1.0), trunk("t/1", 1.0)])
    first, last = (branching.requests(trunks, method.stages(2)[index], method, 0).to_pylist() for index in (1, 0))
    assert [(row["group_id"], row["count"], row["more"], row["explore"]) for row in first] == [("t/0/0", 3, 3, 0.25), ("t/1/0", 3, 3, 0.25)]
    assert [(row["group_id"], row["count"], row["more"], row["explore"]) for row in last] == [("t/0/1", 3, 3, 0.25)]
    fixed = algorithms.make("rtpo", {"n_siblings": 6})
    assert fixed.branches(fixed.stages(2)[1], [trunk("t/0", 0.0)], random.Random(0)) == [Branch(0, 0, 6)]


@pytest.mark.parametrize(("options", "message"), [
    ({"pilots": 6}, r"pilots is 6 and n_siblings is 6; .*expected pilots < n_siblings"),
    ({"reuse_trunk_at_last_turn": True}, r"reuse_trunk_at_last_turn is True; with sibling_budget adaptive a trunk is no pilot"),
    ({"merge_groups": True}, r"merge_groups is True; with sibling_budget adaptive every boundary's own pilots decide about it"),
    ({"sync_every": 0, "rho_max": 2.0}, r"rho_max is 2.0; with sibling_budget adaptive the returns that decided"),
    ({"sibling_budget": "fixed", "explore": 0.5}, r"pilots is 3; with sibling_budget fixed every boundary gets n_siblings at once"),
    ({"sibling_budget": "fixed", "pilots": 4}, r"explore is 0.25; with sibling_budget fixed"),
    ({"sibling_budget": "adaptiv"}, r"sibling_budget is 'adaptiv'; valid choices: fixed, adaptive"),
    ({"pilots": 1}, r"pilots is 1; expected at least 2 \(one return cannot differ from itself\)"),
    ({"explore": 0.0}, r"explore is 0.0; expected more than 0"), ({"explore": 1.5}, r"explore is 1.5; expected at most 1")])
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**{"pilots": 3, **options})


@pytest.mark.parametrize("changes", [
    {"pilots": 1}, {"pilots": 4}, {"explore": 0.0}, {"explore": 1.1}, {"with_trunk": True}, {"merge": True}], ids=str)
def test_a_stage_with_impossible_pilots_is_refused(changes):
    plain = {"turn": 0, "n_siblings": 4, "pilots": 2, "explore": 0.5, "baseline": "boundary", "with_trunk": False}
    assert Stage(**plain).siblings_a_boundary == (2, 4)
    with pytest.raises(ValueError, match="expected 2 <= pilots < n_siblings, 0 < explore <= 1, and neither of the others"):
        Stage(**{**plain, **changes})


# --- credit


def test_an_extended_group_is_credited_as_a_fixed_one_and_weighs_more_when_that_was_luck():
    returns = (0.0, 0.0, 1.0, 0.5)
    fixed = algorithms.make("rtpo", {}).credit(members(*returns, pilots=0))
    sure, lucky = (make().credit(members(*returns, chance=chance)) for chance in (1.0, 0.25))
    assert [one.advantage for one in fixed] == pytest.approx([-0.375, -0.375, 0.625, 0.125])
    assert sure == fixed
    assert [one.advantage for one in lucky] == [one.advantage for one in fixed]
    assert [one.weight for one in lucky] == pytest.approx([1.0] * 4)  # 1/4 each, by 1/.25
    assert make().credit(members(0.0, 0.0, chance=0.25)) == []


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_pilots_that_were_not_followed_are_filtered_and_their_group_stays_in_the_mean(kl):
    method = make(kl_coef=kl)
    groups = [members(0.0, 0.0, chance=0.25, name="t/0/0"), members(0.0, 1.0, 0.0, 0.0, name="t/1/0"),
              members(1.0, 1.0, 1.0, 1.0, chance=0.25, name="t/2/0")]
    table = credited(*groups, algorithm=method)
    found = counts.count_stage(table)
    assert (found.groups, found.siblings, found.comparable) == (3, 10, 10)
    if kl:  # a KL term acts on a group without advantages too, but not on one that has no share
        assert (found.trained, dict(found.filtered)) == (8, {"uncredited": 2})
        weights = {row["group_id"]: row["weight"] for row in table.to_pylist() if row["outcome"] == "trained"}
        assert weights == pytest.approx({"t/1/0": 1 / 4, "t/2/0": 1.0})
    else:
        assert (found.trained, dict(found.filtered)) == (4, {"zero_advantage": 6})


# --- the expectation, over everything that could be sampled


def expected(tree, policy, stage, **options):
    """The expected update of `stage`, by state."""
    return facts_credit._expected(PIPELINE, tree, policy, stage, **options)


@pytest.mark.parametrize(("explore", "pilots", "n", "turn"), [(0.1, 2, 3, 1), (1.0, 2, 3, 1), (0.3, 3, 4, 2)])
def test_the_expected_update_is_that_of_the_fixed_allocation_and_no_other(explore, pilots, n, turn):
    """Returns of .3 to 1, some by coin, and unequal probabilities: the deep tree. The groups' probabilities add up to those of their states."""
    tree, policy = facts_credit.DEEP, facts_credit.SKEWED
    fixed = algorithms.make("rtpo", {"n_siblings": n}).stages(turn + 1)[0]
    stage = make(explore=explore, pilots=pilots, n_siblings=n).stages(turn + 1)[0]
    reach, true = tree.reach(policy), tree.gradient(policy, tree.reach(policy))
    states = [state for state in tree.moves if tree.turn[state] == turn]
    assert sum(chance for chance, _ in lab.boundary_groups(tree, policy, reach, stage)) == pytest.approx(sum(reach[state] for state in states))
    goal, found, naive = expected(tree, policy, fixed), expected(tree, policy, stage), expected(tree, policy, stage, divided=False)
    for state in states:
        assert found[state] == pytest.approx(goal[state], abs=1e-12)
        assert found[state] == pytest.approx([(1 - 1 / n) * value for value in true[state]], abs=1e-12)
    assert (max(abs(naive[state][0] - goal[state][0]) for state in states) > 1e-3) is (explore < 1)


def test_a_sampled_group_says_what_decided_about_it():
    """Of 400 boundaries: extended always when two fair pilots differ, with probability .25 otherwise."""
    tree = facts_credit.WORKED
    method, generator = make(), random.Random(0)
    trunks = rows.rollouts_to_table(lab.sampled_trunks(method, tree, tree.uniform(), tasks=400, seed=1))
    requests = branching.requests(trunks, method.stages(2)[1], method, 0).to_pylist()
    groups = [lab._siblings(tree, tree.uniform(), generator, row) for row in requests]
    assert len(groups) == 400 and {len(one.siblings) for one in groups} == {2, 6} and {one.pilots for one in groups} == {2}
    differ = [len({sibling.returns_to_go for sibling in one.siblings[:2]}) == 2 for one in groups]
    assert all((one.chance, len(one.siblings)) == (1.0, 6) for one, apart in zip(groups, differ, strict=True) if apart)
    agreeing = [one for one, apart in zip(groups, differ, strict=True) if not apart]
    assert {one.chance for one in agreeing} == {0.25}
    extended = sum(len(one.siblings) == 6 for one in agreeing)
    assert abs(extended - 0.25 * len(agreeing)) < 5 * (0.25 * 0.75 * len(agreeing)) ** 0.5
    assert [s.rollout_id for s in groups[0].siblings] == [f"{groups[0].group_id}/{index}" for index in range(len(groups[0].siblings))]
