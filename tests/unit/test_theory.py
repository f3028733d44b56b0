"""Theory against the shipped objects: every fact's numbers, and the laboratory that measures them."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from pipelines import branching, counts, credit, rows
from rtpo_ray import algorithms
from rtpo_ray.theory import facts_credit, facts_sweep, facts_update, lab, report
from rtpo_ray.theory.line import Line
from rtpo_ray.theory.tabular import TabularPolicy
from rtpo_ray.theory.tree import Coin, Tree

PIPELINE = lab.Pipeline(rows=rows, branching=branching, credit=credit, counts=counts)
TRAP = facts_update.TRAP
WORDS = Tree({"start": (1.0, "next", 0.0), "next": (Coin(0.25), 0.5)}, {"start": ((0,), (1, 0), (1, 1, 2))})
WORDY = {"start": (0.2, 0.3, 0.5), "next": (0.6, 0.4)}


@pytest.fixture(scope="module", autouse=True)
def group():
    with lab.process_group():
        yield


# --- facts


@pytest.mark.parametrize("title", [title for title in report.FACTS if title != "every method learns"])  # those one by one below
def test_fact(title):
    lines = report.FACTS[title](PIPELINE)
    assert lines and [line for line in lines if not line.ok] == []


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_method_improves_the_expected_return(name):
    returns = facts_sweep.learned(PIPELINE, name, facts_sweep.SHORT, seed=0)
    assert returns[0] == pytest.approx(0.425)
    assert returns[-1] - returns[0] > facts_sweep.MARGIN  # seeds 0 to 5: at least .19, RTPO and SeeUPO .54


@pytest.mark.parametrize("options", [
    {"merge_groups": True, "n_trunks": 2}, {"reuse_trunk_at_last_turn": True}, {"sync_every": 0, "rho_min": 0.0, "rho_max": 5.0},
    {"epochs": 2, "minibatches": 2}, {"sibling_budget": "adaptive", "n_siblings": 12}], ids=str)
def test_options_of_rtpo_improve_it_too(options):
    returns = facts_sweep.learned(PIPELINE, "rtpo", 9, seed=0, **options)
    assert returns[-1] > 0.9  # of 1


def test_the_report_says_what_is_wrong(monkeypatch):
    said = []
    good, bad = Line("two", 2.0, 2.0), Line("three", 3.0, 3.1, within=0.05)
    monkeypatch.setattr(report, "FACTS", {"first": lambda pipeline: [good], "second": lambda pipeline: [good, bad]})
    assert report.report(said.append, PIPELINE) is False
    assert [line.split()[-1] for line in said[1:-1]] == ["first", "ok", "second", "ok", "WRONG"]
    assert said[-1].startswith("2 of 3 numbers as expected")
    monkeypatch.setattr(report, "FACTS", {"first": lambda pipeline: [good]})
    assert report.report(said.append, PIPELINE) is True


@pytest.mark.parametrize(("line", "ok"), [
    (Line("", 1.0, 1.1, within=0.2), True), (Line("", 1.0, 1.1, within=0.05), False), (Line("", 1.0, math.nan, within=9.0), False),
    (Line("", 1.0, 1.1, sign=">"), True), (Line("", 1.0, 0.9, sign=">"), False), (Line("", 1.0, math.nan, sign=">"), False),
    (Line("", 1.0, 0.9, sign="<"), True), (Line("", 1.0, 1.1, sign="<"), False), (Line("", 1.0, math.nan, sign="<"), False)])
def test_a_line(line, ok):
    assert line.ok is ok


# --- the tree


def test_values_by_hand():
    q = WORDS.action_values(WORDY)
    assert q["next"] == (0.25, 0.5)
    assert q["start"] == pytest.approx((1.0, 0.35, 0.0))
    assert WORDS.value(WORDY) == pytest.approx(0.2 + 0.3 * 0.35)
    assert WORDS.optimum() == {"start": (1.0, 0.0, 0.0), "next": (0.0, 1.0)}
    assert WORDS.reach(WORDY) == {"start": 1.0, "next": 0.3}
    assert (WORDS.turn, WORDS.turns) == ({"start": 0, "next": 1}, 2)


def test_the_gradient_is_that_of_the_value():
    def value(logits):
        policy = {state: torch.softmax(logits[state], 0) for state in TRAP.moves}
        return TRAP.value(policy)

    logits = {state: torch.tensor([0.3 * number, -0.1], dtype=torch.float64, requires_grad=True) for state, number in TRAP.number.items()}
    value(logits).backward()
    policy = {state: torch.softmax(own, 0).tolist() for state, own in logits.items()}
    for state, own in TRAP.gradient(policy, TRAP.reach(policy)).items():
        assert own == pytest.approx(logits[state].grad.tolist(), abs=1e-12)


def test_plays_are_complete_and_sampled_as_often_as_they_should():
    plays = list(WORDS.plays(WORDY))
    assert sum(play.chance for play in plays) == pytest.approx(1.0)
    assert sum(play.chance * play.reward for play in plays) == pytest.approx(WORDS.value(WORDY))
    assert len({(play.steps, play.reward) for play in plays}) == len(plays) == 5
    rng, drawn = random.Random(0), 4000
    found = Counter((play.steps, play.reward) for play in (WORDS.sample(WORDY, rng) for _ in range(drawn)))
    for play in plays:
        assert abs(found[play.steps, play.reward] - drawn * play.chance) < 5 * math.sqrt(drawn * play.chance)


def test_a_rollout_is_what_a_generator_would_have_recorded():
    play = next(play for play in WORDS.plays(WORDY) if play.steps == (("start", 1), ("next", 0)) and play.reward)
    rollout = WORDS.rollout(play, WORDY, rollout_id="r", task_id="t", boundaries=True)
    first, second = rollout.turns
    assert (first.context_ids, first.response_ids, first.reward, first.observation) == ((1,), (1, 0), 0.0, "next")
    assert (second.context_ids, second.response_ids, second.reward, second.observation) == ((2,), (0,), 1.0, "")
    assert first.engine_logprobs == pytest.approx((math.log(0.8), math.log(0.3 / 0.8)))
    kept = [(boundary.turn, boundary.context_hash, boundary.snapshot) for boundary in rollout.boundaries]
    assert kept == [(0, first.context_hash, b"start"), (1, second.context_hash, b"next")]


@pytest.mark.parametrize(("moves", "actions", "named"), [
    ({"a": ("b", "b"), "b": (1.0,)}, None, "'b' after 'a'"), ({"a": ("c",), "b": (1.0,)}, None, "'c' after 'a'"),
    ({"a": ("a",)}, None, "'a' after 'a'"), ({"a": (1.0,), "b": (1.0,)}, None, r"without a parent: \['b'\]"),
    ({"a": (1.0, 0.0)}, {"a": ((0,),)}, r"than of moves: \['a'\]")])
def test_what_is_no_tree_is_refused(moves, actions, named):
    with pytest.raises(ValueError, match=named):
        Tree(moves, actions)


# --- the policy and the learner


def test_the_tabular_policy_is_the_trees():
    policy = TabularPolicy(WORDS, WORDY)
    ids = torch.tensor([[1, 1, 1, 2], [2, 1, 0, 0]])  # the second is padded
    rows_, columns, targets = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 2, 1])
    found, values = policy(ids, rows_, columns, targets, 1.0)
    assert values is None
    assert found.tolist() == pytest.approx([*WORDS.token_logprobs("start", 2, WORDY), math.log(0.4)], abs=1e-6)
    cold, _ = policy(ids, rows_, columns, targets, 0.5)
    assert math.exp(cold[0].item()) == pytest.approx(0.64 / 0.68, abs=1e-6)
    assert math.exp(policy(ids, *(torch.tensor([value]) for value in (0, 0, 2)), 1.0)[0].item()) == 0.0  # no action begins with token 2
    with pytest.raises(KeyError):
        policy(torch.tensor([[9]]), *(torch.tensor([0]) for _ in range(3)), 1.0)


def test_a_learner_begins_where_it_is_told_and_movement_puts_it_back():
    method = algorithms.make("rtpo", {})
    learner = lab.make_learner(WORDS, method.objective, lab.plain_steps(1.0), WORDY)
    for state, own in lab.policy_of(learner, WORDS).items():
        assert own == pytest.approx(WORDY[state], abs=1e-6)
    groups = list(lab.groups_of(WORDS, WORDY, "next", 2))
    assert sum(chance for chance, _ in groups) == pytest.approx(1.0)
    samples = lab.weighed_samples(PIPELINE, method, groups)
    before = lab.logits_of(learner)
    moved = lab.movement(learner, lambda: learner.update(samples, 1, 2, seed=0))
    assert moved.abs().sum() > 0
    assert torch.equal(lab.logits_of(learner), before)


def test_nothing_to_train_is_no_movement():
    learner = lab.make_learner(WORDS, algorithms.make("rtpo", {}).objective, lab.adam(0.1))
    assert lab.movement(learner, lambda: learner.update([], 0, 0, seed=0)).abs().sum() == 0


@pytest.mark.parametrize(("sync_every", "pushes"), [(1, 3), (2, 2), (0, 1)])
def test_generators_get_new_weights_when_the_method_says(monkeypatch, sync_every, pushes):
    """Three stages; where the last one does not publish, the sweep's end does."""
    method = algorithms.make("rtpo", {"sync_every": sync_every})
    learner = lab.make_learner(TRAP, method.objective, lab.adam(0.1))
    pushed = []
    monkeypatch.setattr(lab, "policy_of", lambda *_: pushed.append(1) or TRAP.uniform())
    lab.sampled_sweep(PIPELINE, method, learner, TRAP, TRAP.uniform(), tasks=8, seed=0)
    assert len(pushed) == pushes


def test_a_stage_that_no_trunk_reaches_is_skipped(monkeypatch):
    method = algorithms.make("rtpo", {})
    turns = []
    monkeypatch.setattr(lab, "sampled_stage", lambda *args: turns.append(args[-2].turn) or SimpleNamespace(optimizer_steps=0))
    start = {**WORDS.uniform(), "start": (1.0, 0.0, 0.0)}
    assert lab.sampled_sweep(PIPELINE, method, None, WORDS, start, tasks=4, seed=0) is start
    assert turns == [0]


@pytest.mark.parametrize(("name", "same"), [("drgrpo", True), ("grpo", False), ("rloo", False)])
def test_the_closed_form_notices_another_credit(name, same):
    """On rollouts that all begin at R, Dr.GRPO's credit is RTPO's; a scaled one has another error."""
    tree = facts_credit.WORKED
    policy = tree.uniform()
    found = facts_credit.credited(tree, policy, algorithms.make(name, {}), lab.groups_of(tree, policy, "R", 2, whole=True), 1)
    assert (found["R", 0].error == pytest.approx(facts_credit.closed_form(tree, policy, "R", 0, 2))) is same
