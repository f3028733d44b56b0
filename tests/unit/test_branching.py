"""Trunks to requests, and trunks with their siblings to groups: who is compared with whom, and nobody lost."""

import pytest
from records import failed, group, sibling, trunk

from pipelines.branching import assemble, requests
from pipelines.rows import GROUPS, REQUESTS, groups_to_table, rollouts_to_table, table_to_groups
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Branch, Stage
from rtpo_ray.algorithms.rtpo import Rtpo
from rtpo_ray.errors import MethodError
from rtpo_ray.types import Boundary, Group, Rollout

TURN = {turn: Stage(turn=turn, n_siblings=3, baseline="boundary", with_trunk=False) for turn in range(4)}


def boundary(turn, context="c", state="s"):
    return Boundary(turn=turn, context_hash=f"{context}{turn}", state_hash=f"{state}{turn}", snapshot=bytes([turn]))


def wanted(trunks, stage, name="rtpo", seed=0, **args):
    """(group id, task, parent, count) of every request."""
    table = requests(rollouts_to_table(trunks), stage, algorithms.make(name, args), seed)
    assert table.schema == REQUESTS
    return [(row["group_id"], row["task_id"], row["parent"], row["count"]) for row in table.to_pylist()]


def put_together(trunks, branches, stage):
    """(group id, turn, rollout ids) of every group."""
    table = assemble(rollouts_to_table(trunks), groups_to_table(branches), stage)
    assert table.schema == GROUPS
    return [(one.group_id, one.turn, [sibling.rollout_id for sibling in one.siblings]) for one in table_to_groups(table)]


# --- requests


def test_requests_are_the_boundaries_of_one_turn_in_the_order_of_the_trunks():
    trunks = [
        Rollout(rollout_id="a/0", task_id="a", turns=(), boundaries=(boundary(0), boundary(1))),
        Rollout(rollout_id="b/0", task_id="b", turns=(), boundaries=(boundary(0),)),
        Rollout(rollout_id="c/0", task_id="c", turns=(), end="failed", failure="x"),
        Rollout(rollout_id="c/1", task_id="c", turns=(), boundaries=(boundary(0), boundary(1), boundary(2)))]
    found = {turn: wanted(trunks, TURN[turn]) for turn in range(4)}
    assert found[0] == [("a/0/0", "a", "a/0", 3), ("b/0/0", "b", "b/0", 3), ("c/1/0", "c", "c/1", 3)]
    assert found[1] == [("a/0/1", "a", "a/0", 3), ("c/1/1", "c", "c/1", 3)]
    assert found[2] == [("c/1/2", "c", "c/1", 3)] and found[3] == []
    table = requests(rollouts_to_table(trunks), TURN[1], algorithms.make("rtpo", {}), 0)
    assert [Boundary(**row["boundary"]) for row in table.to_pylist()] == [boundary(1), boundary(1)]


def test_a_trunk_that_takes_part_leaves_one_sibling_less_to_ask_for():
    stage = Stage(turn=1, n_siblings=3, baseline="boundary", with_trunk=True)
    assert wanted([trunk("t/0", 0.0, 1.0)], stage) == [("t/0/1", "t", "t/0", 2)]


@pytest.mark.parametrize("broken", [failed("t/1"), trunk("t/1", 0.0, 1.0, end="failed", failure="E: late"), trunk("t/1", end="overlong")])
def test_trunks_that_failed_or_never_began_are_asked_for_nothing(broken):
    rollouts = [trunk("t/0", 0.0, 1.0), broken, trunk("t/2", 0.0)]
    assert wanted(rollouts, TURN[0]) == [("t/0/0", "t", "t/0", 3), ("t/2/0", "t", "t/2", 3)]
    grown = wanted(rollouts, Stage(), "treegrpo", n_branches=2)
    assert {row[2] for row in grown} == {"t/0", "t/2"} and sum(row[3] for row in grown) == 4  # the index of a branch skips the broken one
    assert wanted([broken], Stage(), "treegrpo") == wanted([broken], Stage(), "arpo") == wanted([broken], Stage(baseline="boundary"), "refuel") == []


@pytest.mark.parametrize("name", [name for name, cls in algorithms.REGISTRY.items() if not cls.branching])
def test_methods_that_do_not_branch_ask_for_nothing(name):
    assert wanted([trunk("t/0", 0.0, 1.0), trunk("t/1", 1.0)], Stage(), name) == []


@pytest.mark.parametrize(("answer", "message"), [
    (lambda: [Branch(2, 0, 1)], r"Odd\.branches returned Branch\(trunk=2, turn=0, count=1, more=0, explore=0.0\); expected a Branch of one of 2"),
    (lambda: [Branch(-1, 0, 1)], r"expected a Branch of one of 2 trunks"), (lambda: [Branch(0, 0, -1)], r"and a count of 0 or more"),
    (lambda: [(0, 0, 1)], r"Odd\.branches returned \(0, 0, 1\)"), (lambda: 1 / 0, r"Odd\.branches raised ZeroDivisionError on 2 trunks"),
    (lambda: [Branch(1, 1, 1)], r"task t: Odd\.branches names turn 1 of trunk 1, whose boundaries are at turns \[0\]")])
def test_branches_that_cannot_be_are_refused(answer, message):
    class Odd(Rtpo):
        def branches(self, stage, trunks, rng):
            return answer()

    with pytest.raises(MethodError, match=message):
        requests(rollouts_to_table([trunk("t/0", 0.0, 1.0), trunk("t/1", 1.0)]), TURN[0], Odd(), 0)


def test_a_branch_of_nobody_is_no_request():
    class Odd(Rtpo):
        def branches(self, stage, trunks, rng):
            return [Branch(0, 1, 0), Branch(1, 0, 2)]

    table = requests(rollouts_to_table([trunk("t/0", 0.0, 1.0), trunk("t/1", 1.0)]), TURN[0], Odd(), 0)
    assert table["group_id"].to_pylist() == ["t/1/0"] and table["count"].to_pylist() == [2]


def test_draws_depend_on_seed_and_task_and_not_on_the_block():
    def of(task):
        made = trunk(f"{task}/0", *(0.0,) * 8)
        return Rollout(rollout_id=made.rollout_id, task_id=task, turns=made.turns, boundaries=made.boundaries)

    trunks = [of(task) for task in "abcdefgh"]
    together = wanted(trunks, Stage(baseline="boundary"), "refuel")
    alone = [row for one in trunks for row in wanted([one], Stage(baseline="boundary"), "refuel")]
    assert together == alone != wanted(trunks, Stage(baseline="boundary"), "refuel", seed=1)
    assert len({row[0].rpartition("/")[2] for row in together}) > 2  # tasks draw apart


# --- groups


def test_siblings_of_a_boundary_are_the_group_as_they_came():
    trunks = [trunk("t/0", 0.0, 1.0), trunk("t/1", 1.0)]
    made = [group(sibling("t/0/0/0", 1.0), sibling("t/0/0/1", 0.0), name="t/0/0"), group(sibling("t/1/0/0", 0.0, parent="t/1"), name="t/1/0")]
    assert table_to_groups(assemble(rollouts_to_table(trunks), groups_to_table(made), TURN[0])) == made
    assert put_together(trunks, [], TURN[1]) == []


def test_the_trunk_is_one_of_its_siblings_from_the_boundary_on():
    stage = Stage(turn=1, n_siblings=2, baseline="boundary", with_trunk=True)
    own = trunk("t/0", 0.25, 0.5, 1.0)
    made = group(sibling("t/0/1/0", 1.0, turn=1), name="t/0/1", turn=1)
    (one,) = table_to_groups(assemble(rollouts_to_table([own]), groups_to_table([made]), stage))
    assert (one.group_id, one.turn, [sibling.rollout_id for sibling in one.siblings]) == ("t/0/1", 1, ["t/0/1/trunk", "t/0/1/0"])
    first = one.siblings[0]
    assert first.turns == own.turns[1:] and (first.returns_to_go, first.parent, first.boundaries) == (1.5, "", ())
    assert one.siblings[1] == made.siblings[0]


def places(*hashes):
    return [(turn, *pair) for turn, pair in enumerate(hashes)]


@pytest.mark.parametrize("with_trunk", [False, True])
def test_boundaries_with_the_same_context_and_state_share_a_group_and_others_do_not(with_trunk):
    """Turn 0 of three trunks: the first two are identical, the third has another state."""
    stage = Stage(turn=0, n_siblings=2, baseline="boundary", with_trunk=with_trunk, merge=True)
    trunks = [trunk("t/0", 0.0, 1.0, boundaries=places(("c", "s"), ("d", "s"))), trunk("t/1", 0.0, boundaries=places(("c", "s"))),
              trunk("t/2", 0.0, boundaries=places(("c", "other")))]
    made = [group(sibling(f"t/{i}/0/0", 1.0, parent=f"t/{i}"), name=f"t/{i}/0") for i in range(3)]
    own = [[f"t/{i}/0/trunk"] if with_trunk else [] for i in range(3)]
    assert put_together(trunks, made, stage) == [
        ("t/0/0", 0, [*own[0], "t/0/0/0", *own[1], "t/1/0/0"]), ("t/2/0", 0, [*own[2], "t/2/0/0"])]
    assert [name for name, _, _ in put_together(trunks, made, Stage(turn=0, n_siblings=2, baseline="boundary", with_trunk=with_trunk))] == [
        "t/0/0", "t/1/0", "t/2/0"]


@pytest.mark.parametrize("places_of_two", [places(("other", "s")), places(("c", "other"))])
def test_a_context_or_a_state_alone_is_not_enough_to_merge(places_of_two):
    stage = Stage(turn=0, n_siblings=1, baseline="boundary", with_trunk=False, merge=True)
    trunks = [trunk("t/0", 0.0, boundaries=places(("c", "s"))), trunk("t/1", 0.0, boundaries=places_of_two)]
    made = [group(sibling(f"t/{i}/0/0", 1.0, parent=f"t/{i}"), name=f"t/{i}/0") for i in range(2)]
    assert [name for name, _, _ in put_together(trunks, made, stage)] == ["t/0/0", "t/1/0"]


def test_tasks_are_never_merged():
    stage = Stage(turn=0, n_siblings=1, baseline="boundary", with_trunk=False, merge=True)
    trunks = [trunk("a/0", 0.0), trunk("b/0", 0.0)]
    trunks = [Rollout(rollout_id=one.rollout_id, task_id=one.rollout_id[0], turns=one.turns, boundaries=one.boundaries) for one in trunks]
    made = [Group(group_id=f"{name}/0/0", task_id=name, turn=0, siblings=(sibling(f"{name}/0/0/0", 1.0, parent=f"{name}/0"),)) for name in "ab"]
    assert [name for name, _, _ in put_together(trunks, made, stage)] == ["a/0/0", "b/0/0"]


def test_all_rollouts_of_a_task_are_one_group_with_trunks_first():
    def of(name, task, parent=""):
        made = trunk(name, 0.0, 1.0) if not parent else sibling(name, 1.0, turn=1, parent=parent)
        return Rollout(rollout_id=name, task_id=task, turns=made.turns, boundaries=made.boundaries, parent=parent)

    trunks = [of("a/0", "a"), of("a/1", "a"), of("b/0", "b")]
    grown = [Group(group_id=name, task_id=name[0], turn=turn, siblings=tuple(of(f"{name}/{j}", name[0], name[:3]) for j in range(count)))
             for name, turn, count in (("a/1/1", 1, 2), ("b/0/1", 1, 1), ("a/0/0", 0, 1))]
    assert put_together(trunks, grown, Stage()) == [
        ("a", None, ["a/0", "a/1", "a/1/1/0", "a/1/1/1", "a/0/0/0"]), ("b", None, ["b/0", "b/0/1/0"])]
    assert put_together(trunks, [], Stage()) == [("a", None, ["a/0", "a/1"]), ("b", None, ["b/0"])]
    assert put_together(trunks, grown, Stage(with_trunk=False))[1] == ("b", None, ["b/0/1/0"])
    (one, _) = table_to_groups(assemble(rollouts_to_table(trunks), groups_to_table(grown), Stage()))
    assert all(sibling.boundaries == () for sibling in one.siblings) and one.siblings[0].turns == trunks[0].turns
    assert [sibling.parent for sibling in one.siblings] == ["", "", "a/1", "a/1", "a/0"]


def test_a_failed_trunk_stays_in_its_tasks_group():
    trunks = [trunk("t/0", 1.0), failed("t/1", "E: lost"), trunk("t/2", 0.0)]
    table = assemble(rollouts_to_table(trunks), GROUPS.empty_table(), Stage())
    (one,) = table_to_groups(table)
    assert [(sibling.rollout_id, sibling.end, sibling.failure) for sibling in one.siblings] == [
        ("t/0", "terminated", ""), ("t/1", "failed", "E: lost"), ("t/2", "terminated", "")]


def test_no_trunks_are_no_groups():
    for stage in (Stage(), TURN[0], Stage(turn=0, n_siblings=2, baseline="boundary", merge=True)):
        assert put_together([], [], stage) == []
    assert wanted([], TURN[0]) == wanted([], Stage(), "treegrpo") == []
