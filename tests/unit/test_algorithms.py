"""Every method's credit, stages and branches against numbers worked out by hand; the credit's weights add up to what they should."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from records import group, rng_of, sibling, trunk, turn_record

from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Branch, Critic, Objective, Stage, TurnOrder
from rtpo_ray.algorithms.credit import chains, leave_one_out, standardised
from rtpo_ray.types import Boundary, Rollout

Z = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # of R = (1, 0, 0, 1): mean .5, standard deviation (ddof 1) .57735


def make(name, **args):
    made = algorithms.make(name, args)
    made.check(max_turns=3)
    return made


def task(*siblings):
    return group(*siblings, name="t", turn=None)


def four(turns=1):
    """Four trunks of as many turns with R = (1, 0, 0, 1)."""
    return task(*(trunk(f"t/{i}", *(0.0,) * (turns - 1), reward) for i, reward in enumerate((1.0, 0.0, 0.0, 1.0))))


def ragged():
    """Two trunks: responses of 1 and 3 tokens with R = 1, and one response of 2 tokens with R = 0."""
    first = (turn_record(0, (1,), (5,)), turn_record(1, (1, 5), (6, 7, 8), reward=1.0))
    second = (turn_record(0, (1,), (5, 6)),)
    return task(Rollout(rollout_id="t/0", task_id="t", turns=first), Rollout(rollout_id="t/1", task_id="t", turns=second))


def told(credits):
    """(sibling, turn, advantage, weight) of each, rounded."""
    return [(c.sibling, c.record.turn, round(c.advantage, 6), round(c.weight, 6)) for c in credits]


def weights(credits):
    """Sum by sibling."""
    sums = Counter()
    for credit in credits:
        sums[credit.sibling] += credit.weight
    return dict(sums)


# --- baselines


def test_standardised_has_ddof_1_and_an_epsilon():
    assert standardised([1, 0, 0, 1]) == pytest.approx([Z, -Z, -Z, Z], abs=1e-12)
    assert Z == pytest.approx(0.8660, abs=1e-4) and Z < 0.866025  # ddof 0 would be .99999
    assert standardised([1e-6, -1e-6]) == pytest.approx([1e-6 / (math.sqrt(2) * 1e-6 + 1e-6), -1e-6 / (math.sqrt(2) * 1e-6 + 1e-6)])
    assert standardised([3, 3, 3]) == [0, 0, 0] and standardised([7]) == [0] and standardised([]) == []


def test_leave_one_out():
    assert leave_one_out([1, 0, 0, 1]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out([3, 0, 0]) == pytest.approx([3.0, -1.5, -1.5])  # 3 - 0, 0 - 1.5
    assert leave_one_out([7]) == [0]


# --- flat methods


@pytest.mark.parametrize(("name", "size"), [("grpo", Z), ("gspo", Z), ("dapo", Z), ("rloo", 2 / 3), ("drgrpo", 0.5), ("ppo", 0.0), ("seeupo", 0.5)])
@pytest.mark.parametrize("turns", [1, 2])
def test_the_advantage_of_a_rollout_is_on_all_its_turns(name, size, turns):
    credits = make(name).credit(four(turns))
    assert [(c.sibling, c.record.turn) for c in credits] == [(i, k) for i in range(4) for k in range(turns)]
    assert [c.advantage for c in credits] == pytest.approx([sign * size for sign in (1, -1, -1, 1) for _ in range(turns)], abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "rloo", "drgrpo", "seeupo", "gigpo", "treegrpo", "arpo"])
def test_a_rollout_alone_learns_nothing(name):
    found = [c.advantage for c in make(name).credit(task(steps("t/0", ("x", 0.0), ("y", 1.0))))]
    assert found == ([] if name == "dapo" else [0.0, 0.0])  # DAPO leaves such a group out, of the KL term and of its token mean too


@pytest.mark.parametrize(("name", "expected"), [
    # 1/N a rollout, spread over its tokens: 1 + 3 of the first, 2 of the second
    *((name, [0.5 * 1 / 4, 0.5 * 3 / 4, 0.5]) for name in ("grpo", "gspo", "rloo", "gigpo", "treegrpo", "arpo")),
    *((name, [1.0, 3.0, 2.0]) for name in ("dapo", "ppo")),  # a token is a token
    ("drgrpo", [1 / 128, 3 / 128, 2 / 128]),  # 1 / (2 rollouts x 64)
    ("seeupo", [0.5, 0.5, 0.5]),  # 1/N a response
])
def test_weights_of_ragged_rollouts(name, expected):
    credits = make(name).credit(ragged())
    assert [c.weight for c in credits] == pytest.approx(expected)
    assert [c.advantage > 0 for c in credits] == ([True, True, False] if name != "ppo" else [False] * 3)


def test_dr_grpo_divides_by_its_own_constant():
    assert [c.weight for c in make("drgrpo", divisor=10).credit(ragged())] == pytest.approx([1 / 20, 3 / 20, 2 / 20])


def test_seeupo_normalises_in_the_group_or_leaves_it_to_the_learner():
    for normalisation, size in (("batch", 0.5), ("none", 0.5), ("group", Z)):
        made = make("seeupo", normalisation=normalisation)
        assert [c.advantage for c in made.credit(four())] == pytest.approx([size, -size, -size, size])
        assert made.objective.normalise is (normalisation == "batch")


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "gigpo", "treegrpo", "arpo"])
@pytest.mark.parametrize("seed", range(4))
def test_weights_of_a_group_sum_to_one_whatever_its_shape(name, seed):
    rng = rng_of(seed)
    trunks = [trunk(f"t/{i}", *(rng.random() for _ in range(rng.randint(1, 4)))) for i in range(rng.randint(2, 5))]
    credits = make(name).credit(task(*trunks))
    assert weights(credits) == pytest.approx({i: 1 / len(trunks) for i in range(len(trunks))})
    assert sum(c.weight for c in credits) == pytest.approx(1.0)


# --- GiGPO


def steps(name, *turns):
    """A trunk of (state, reward) turns."""
    return Rollout(rollout_id=name, task_id="t", turns=tuple(turn_record(k, reward=r, state_hash=state) for k, (state, r) in enumerate(turns)))


def test_gigpo_adds_the_step_advantage_within_shared_states():
    """Returns 1, 0, 1, so A_episode = (.57735, -1.1547, .57735). State s is shared by all first steps, state x by two second steps; the
    step returns at gamma .5 are (.5, 0, .5) in s, so the same again, and (1, 0) in x. State y is alone."""
    made = task(steps("t/0", ("s", 0.0), ("x", 1.0)), steps("t/1", ("s", 0.0), ("x", 0.0)), steps("t/2", ("s", 0.0), ("y", 1.0)))
    credits = make("gigpo", gamma=0.5, step_weight=2.0).credit(made)
    high, low, root = 1 / math.sqrt(3), -2 / math.sqrt(3), math.sqrt(0.5)
    expected = [high + 2 * high, high + 2 * root, low + 2 * low, low - 2 * root, high + 2 * high, high + 0.0]
    assert [c.advantage for c in credits] == pytest.approx(expected, abs=2e-5)
    plain = make("gigpo", gamma=0.5, step_weight=0.0).credit(made)
    assert [c.advantage for c in plain] == pytest.approx([high, high, low, low, high, high], abs=1e-5)


def test_gigpo_discounts_by_turns_and_compares_a_state_that_a_rollout_meets_twice():
    """t/0 stands in s at turns 0 and 1 with step returns .5 x (.5 x 1) = .25 and .5; t/1 stands there once with 0."""
    made = task(steps("t/0", ("s", 0.0), ("s", 0.0), ("z", 1.0)), steps("t/1", ("s", 0.0)))
    credits = make("gigpo", gamma=0.5).credit(made)
    episode = math.sqrt(0.5)
    expected = [episode + 0.0, episode + 1.0, episode + 0.0, -episode - 1.0]  # std of .25, .5, 0: .25
    assert [c.advantage for c in credits] == pytest.approx(expected, abs=1e-4)


def test_gigpo_gives_a_summary_the_advantage_of_its_turn():
    turns = (turn_record(0, state_hash="s"), turn_record(0, state_hash="s2", kind="summary"), turn_record(1, state_hash="x", reward=1.0))
    made = task(Rollout(rollout_id="t/0", task_id="t", turns=turns), steps("t/1", ("s", 0.0)))
    credits = make("gigpo").credit(made)
    root = math.sqrt(0.5)
    assert [c.advantage for c in credits] == pytest.approx([2 * root, 2 * root, root, -2 * root], abs=1e-5)
    assert [c.weight for c in credits] == pytest.approx([1 / 6] * 3 + [1 / 2])


# --- trees


@pytest.mark.parametrize(("trees", "expected"), [
    ([[1, 0], [1, 0]], [1.5731, -1.5731, 1.5731, -1.5731]),
    ([[1, 1], [0, 0]], [0.8660, 0.8660, -0.8660, -0.8660]),
    ([[1, 0], [0, 0]], [2.2071, -1.2071, -0.5, -0.5]),
])
def test_treegrpo_compares_a_leaf_with_its_task_and_its_tree(trees, expected):
    leaves = [one for i, (own, grown) in enumerate(trees)
              for one in (trunk(f"t/{i}", float(own)), sibling(f"t/{i}/0/0", float(grown), parent=f"t/{i}"))]
    credits = make("treegrpo").credit(task(*leaves))
    assert [c.advantage for c in credits] == pytest.approx(expected, abs=1e-4)
    mixed = [leaves[index] for index in (0, 2, 1, 3)]  # trunks first, as groups come
    assert [c.advantage for c in make("treegrpo").credit(task(*mixed))] == pytest.approx([expected[index] for index in (0, 2, 1, 3)], abs=1e-4)


def chain_task():
    """A trunk of three turns and two branches from its turns 1 and 2; the rewards make the returns 1, .25 + 0 and .25 + 0 + .5."""
    own = Rollout(rollout_id="t/0", task_id="t", turns=(
        turn_record(0, (1,), (2, 3), reward=0.25), turn_record(0, (1, 2), (4,), kind="summary"), turn_record(1, (1, 4), (5,), reward=0.0),
        turn_record(2, (1, 5), (6,), reward=0.75)))
    one = Rollout(rollout_id="t/0/1/0", task_id="t", parent="t/0", turns=(turn_record(1, (1, 4), (7, 7, 7), reward=0.0),))
    two = Rollout(rollout_id="t/0/2/0", task_id="t", parent="t/0", turns=(turn_record(2, (1, 5), (8, 8), reward=0.5),))
    return task(own, one, two)


@pytest.mark.parametrize("name", ["treegrpo", "arpo"])
def test_a_leaf_is_trained_with_the_whole_chain_above_it(name):
    made = chain_task()
    own, one, two = made.siblings
    assert chains(made) == [own.turns, (*own.turns[:2], *one.turns), (*own.turns[:3], *two.turns)]
    credits = make(name).credit(made)
    assert [(c.sibling, c.record) for c in credits] == [(i, record) for i, chain in enumerate(chains(made)) for record in chain]
    assert [c.weight for c in credits] == pytest.approx([
        2 / 15, 1 / 15, 1 / 15, 1 / 15, 2 / 18, 1 / 18, 3 / 18, 2 / 18, 1 / 18, 1 / 18, 2 / 18])
    # returns 1, .25, .75: mean 2/3, standard deviation .381881
    z = [x / 0.381881 for x in (1 / 3, -5 / 12, 1 / 12)]
    times = 2 if name == "treegrpo" else 1  # the one tree is the task
    assert [c.advantage for c in credits] == pytest.approx([times * z[c.sibling] for c in credits], abs=1e-4)


def test_a_branch_that_was_cut_off_at_once_has_no_chain():
    made = task(trunk("t/0", 1.0, 0.0), replace(sibling("t/0/1/0", parent="t/0"), end="overlong"))
    assert chains(made)[1] == ()
    assert {c.sibling for c in make("arpo").credit(made)} == {0}


def test_treegrpo_draws_its_nodes_from_the_chain_the_root_included():
    method, trunks = make("treegrpo", n_branches=30), [trunk("t/0", 0.0, 0.0, 0.0), trunk("t/1", 0.0)]
    branches = method.branches(Stage(), trunks, random.Random(0))
    assert [(b.trunk, b.turn) for b in branches] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert sum(b.count for b in branches[:3]) == 30 and branches[3].count == 30 and min(b.count for b in branches) >= 4
    assert method.branches(Stage(), trunks, random.Random(0)) == branches != method.branches(Stage(), trunks, random.Random(1))
    assert method.branches(Stage(), [], random.Random(0)) == []


def unsure(name, *entropies):
    """A trunk whose k-th response has this entropy, with `max_entropy` 1."""
    turns = tuple(turn_record(k, response=(1, 2), engine_logprobs=(-h, -h)) for k, h in enumerate(entropies))
    kept = tuple(Boundary(turn=k, context_hash="c", state_hash="s", snapshot=b"") for k in range(len(turns)))
    return Rollout(rollout_id=name, task_id="t", turns=turns, boundaries=kept)


def grown(method, *trunks):
    return {(b.trunk, b.turn): b.count for b in method.branches(Stage(), trunks, random.Random(0))}


def test_arpo_branches_where_the_entropy_rose_enough():
    """Score .5 + .2 (H_k - H_0): above .5 exactly when the entropy rose, and never at the task's start. The rest becomes fresh chains."""
    method = make("arpo", n_trunks=2, budget=6, max_entropy=1.0)
    assert grown(method, unsure("t/0", 0.5, 0.6, 0.5), unsure("t/1", 0.5, 0.4, 0.9)) == {(0, 1): 1, (1, 2): 1, (0, 0): 1, (1, 0): 1}
    higher = make("arpo", n_trunks=2, budget=6, max_entropy=1.0, threshold=0.55)
    assert grown(higher, unsure("t/0", 0.5, 0.6, 0.5), unsure("t/1", 0.5, 0.4, 0.9)) == {(1, 2): 1, (0, 0): 2, (1, 0): 1}  # .58; .52 is not enough
    scaled = make("arpo", n_trunks=2, budget=6, max_entropy=2.0, threshold=0.55)
    assert grown(scaled, unsure("t/0", 0.5, 0.6, 0.5), unsure("t/1", 0.5, 0.4, 0.9)) == {(0, 0): 2, (1, 0): 2}  # .54


def test_arpo_spends_its_budget_on_earlier_turns_first():
    rising = [unsure(f"t/{i}", 0.1, 0.5, 0.9) for i in range(3)]
    assert grown(make("arpo", n_trunks=3, budget=7, max_entropy=1.0), *rising) == {(0, 1): 1, (1, 1): 1, (2, 1): 1, (0, 2): 1}
    assert grown(make("arpo", n_trunks=3, budget=3, max_entropy=1.0), *rising) == {}


def test_arpo_fills_up_with_fresh_chains():
    sure = [unsure(f"t/{i}", 0.5, 0.1) for i in range(2)]
    assert grown(make("arpo", n_trunks=2, budget=7, max_entropy=1.0), *sure) == {(0, 0): 3, (1, 0): 2}
    assert grown(make("arpo", n_trunks=2, budget=7)) == {}


def test_arpo_looks_at_the_first_tokens_of_actions_only():
    def one(logprobs, kind="action"):
        turns = (turn_record(0, engine_logprobs=(-0.5, -0.5)), turn_record(1, response=(1,) * 3, engine_logprobs=logprobs, kind=kind))
        kept = tuple(Boundary(turn=k, context_hash="c", state_hash="s", snapshot=b"") for k in range(2))
        return Rollout(rollout_id="t/0", task_id="t", turns=turns, boundaries=kept)

    method = make("arpo", n_trunks=1, budget=2, max_entropy=1.0, entropy_tokens=2)
    assert grown(method, one((-0.6, -0.6, 0.0))) == {(0, 1): 1}  # the third token would bring the mean to .4
    assert grown(method, one((-0.4, -0.4, -9.0))) == {(0, 0): 1}
    assert grown(method, one((-9.0,) * 3, kind="summary")) == {(0, 0): 1}


# --- REFUEL


def test_refuel_grows_one_sibling_a_trunk_from_a_boundary_drawn_evenly():
    method = make("refuel")
    assert method.stages(3) == (Stage(baseline="boundary"),) and Stage(baseline="boundary").with_trunk
    trunks, drawn = [trunk("t/0", 0.0, 0.0, 0.0), trunk("t/1", 0.0)], Counter()
    for seed in range(90):
        first, second = method.branches(method.stages(3)[0], trunks, random.Random(seed))
        assert (first.trunk, first.count, second) == (0, 1, Branch(1, 0, 1))
        drawn[first.turn] += 1
    assert set(drawn) == {0, 1, 2} and min(drawn.values()) >= 18


def test_refuel_credits_half_the_difference_on_the_shared_turn():
    pair = group(sibling("t/0/1/trunk", 0.0, 1.0, turn=1, parent=""), sibling("t/0/1/0", 0.25, turn=1), turn=1)
    credits = make("refuel").credit(pair)
    assert told(credits) == [(0, 1, 0.375, 0.5), (1, 1, -0.375, 0.5)]
    assert make("refuel", eta=2.0).objective == Objective(loss="regression", eta=2.0)


# --- RTPO


def test_rtpo_credits_its_own_turn_alone_and_does_not_divide_by_a_standard_deviation():
    made = group(sibling("a", 0.0, 1.0, turn=1), sibling("b", 0.0, 0.25, 0.0, turn=1), sibling("c", 0.25, turn=1), turn=1)
    assert told(make("rtpo").credit(made)) == [(0, 1, 0.5, round(1 / 3, 6)), (1, 1, -0.25, round(1 / 3, 6)), (2, 1, -0.25, round(1 / 3, 6))]


def test_rtpo_spreads_a_siblings_weight_over_its_response_and_the_summary_of_the_turn():
    """Response of 3 tokens and summary of 1: every token of the turn weighs the same, and the next turn's summary nothing."""
    turns = (turn_record(1, (1,), (2, 2, 2)), turn_record(1, (1, 2), (3,), kind="summary"), turn_record(2, (1,), (4,), reward=1.0),
             turn_record(2, (1, 4), (5,), kind="summary"))
    made = group(Rollout(rollout_id="a", task_id="t", turns=turns, parent="t/0"), sibling("b", 0.0, turn=1), turn=1)
    credits = make("rtpo").credit(made)
    assert told(credits) == [(0, 1, 0.5, 0.375), (0, 1, 0.5, 0.125), (1, 1, -0.5, 0.5)]
    assert [c.record.kind for c in credits] == ["action", "summary", "action"]


def test_rtpo_stages_run_from_the_last_turn_to_the_first():
    made = make("rtpo", n_siblings=3, n_trunks=4, clip_low=0.1, clip_high=0.3, epochs=2, minibatches=5)
    assert made.stages(3) == [Stage(turn=turn, n_siblings=3, baseline="boundary", with_trunk=False) for turn in (2, 1, 0)]
    assert made.n_trunks == 4 and made.branching
    objective = made.objective
    assert (objective.clip_low, objective.clip_high, objective.epochs, objective.minibatches) == (0.1, 0.3, 2, 5)
    assert (objective.old_policy, objective.continuation_clamp, objective.mean_over, objective.ratio) == ("learner", None, "groups", "token")


@pytest.mark.parametrize(("sync_every", "published"), [
    (0, [False] * 5), (1, [True] * 5), (2, [False, True, False, True, False]), (3, [False, False, True, False, False]), (5, [False] * 4 + [True])])
def test_rtpo_publishes_every_so_many_stages(sync_every, published):
    made = make("rtpo", sync_every=sync_every)
    assert [stage.publish for stage in made.stages(5)] == published
    assert made.objective.old_policy == ("learner" if sync_every == 1 else "engine")


def test_rtpo_clamps_continuations_when_they_are_stale():
    assert make("rtpo", sync_every=0).objective.continuation_clamp is None
    made = make("rtpo", sync_every=2, rho_min=0.5, rho_max=2.0).objective
    assert (made.continuation_clamp, made.needs_all) == ((0.5, 2.0), True)
    assert make("rtpo", sync_every=0, rho_min=1.0, rho_max=3.0).objective.continuation_clamp == (1.0, 3.0)


def test_rtpo_reuses_the_trunk_at_the_last_turn_only():
    made = make("rtpo", n_siblings=4, reuse_trunk_at_last_turn=True, merge_groups=True)
    stages = made.stages(3)
    assert [(stage.turn, stage.with_trunk, stage.merge) for stage in stages] == [(2, True, True), (1, False, True), (0, False, True)]
    trunks = [trunk("t/0", 0.0, 0.0, 0.0), trunk("t/1", 0.0)]
    branches = [made.branches(stage, trunks, random.Random(0)) for stage in stages]
    assert branches == [[Branch(0, 2, 3)], [Branch(0, 1, 4)], [Branch(0, 0, 4), Branch(1, 0, 4)]]


# --- objectives


@pytest.mark.parametrize(("name", "expected"), [
    ("rtpo", Objective()), ("grpo", Objective()), ("rloo", Objective()), ("drgrpo", Objective()), ("gigpo", Objective()), ("treegrpo", Objective()),
    ("arpo", Objective()), ("gspo", Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)),
    ("dapo", Objective(clip_high=0.28, mean_over="weights")),
    ("refuel", Objective(loss="regression")), ("seeupo", Objective(ratio="sequence", normalise=True, turns=TurnOrder())),
    ("ppo", Objective(mean_over="weights", critic=Critic(lam=0.95)))])
def test_what_every_method_maximises_by_default(name, expected):
    assert make(name).objective == expected


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_shared_options_reach_every_objective(name):
    args = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 3.0, "kl_coef": 0.01, "tis_cap": 2.0, "epochs": 3, "minibatches": 4}
    if name == "refuel":
        for option in ("clip_low", "clip_high", "dual_clip", "tis_cap"):
            with pytest.raises(ValueError, match=rf"{option} is {args[option]}; REFUEL's squared error has no ratio"):
                make(name, **{option: args[option]})
        args = {key: args[key] for key in ("kl_coef", "epochs", "minibatches")}
    objective = make(name, **args).objective
    assert {key: getattr(objective, key) for key in args} == args and objective.needs_all


def test_options_of_ppo_and_seeupo_reach_their_objectives():
    critic = make("ppo", level="turn", gamma=0.9, lam=0.5, value_coef=0.1, value_clip=0.0, whiten=False).objective.critic
    assert critic == Critic(level="turn", gamma=0.9, lam=0.5, coef=0.1, clip=0.0, whiten=False)
    turns = make("seeupo", update_order="random", carry="geometric", carry_clip=0.2, advantage_clip=3.0).objective.turns
    assert turns == TurnOrder(order="random", carry="geometric", carry_clip=0.2, advantage_clip=3.0)


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_methods_that_do_not_branch_have_one_stage_on_whole_rollouts(name):
    made = make(name)
    assert made.branching is (name in ("rtpo", "treegrpo", "arpo", "refuel"))
    if not made.branching:
        assert list(made.stages(4)) == [Stage()]
    assert Stage() == Stage(turn=None, n_siblings=0, baseline="task", with_trunk=True, merge=False, publish=True)
