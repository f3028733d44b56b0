"""Facts about credit alone: every group that could be sampled goes through `algorithm.credit`, weighed by its probability.

"Trajectory" is Dr.GRPO's credit, R - mean(R) over whole rollouts: the baseline that RTPO takes over siblings, on the same rewards and with
no division that would hide the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Algorithm, Stage
from rtpo_ray.theory.lab import TASK, Pipeline, boundary_groups, extended_groups, groups_of, pull, weighed_samples
from rtpo_ray.theory.line import Line
from rtpo_ray.theory.tree import Coin, Play, Probabilities, Tree
from rtpo_ray.types import Group

WORKED = Tree({"start": ("L", "R"), "L": (Coin(0.2), Coin(0.0)), "R": (Coin(1.0), Coin(0.8))})
WORKED_SURE = Tree({"start": ("L", "R"), "L": (0.2, 0.0), "R": (1.0, 0.8)})
EVEN = Tree({"start": ("L", "R"), "L": (0.98, 0.0), "R": (1.0, 0.0)})
DEEP = Tree({"start": ("L", 0.3, "R"), "L": (Coin(0.7), "LL"), "R": (0.9, Coin(0.1)), "LL": (1.0, Coin(0.25))})
SKEWED: Probabilities = {"start": (0.5, 0.2, 0.3), "L": (0.6, 0.4), "R": (0.1, 0.9), "LL": (0.75, 0.25)}


@dataclass(frozen=True, slots=True)
class Credited:
    """The first rollout's advantage, given that it took this action in this state."""

    chance: float
    mean: float
    error: float  # mean squared distance from Q - V


def credited(
    tree: Tree, policy: Probabilities, algorithm: Algorithm, groups: Iterable[tuple[float, Group]], turn: int,
) -> dict[tuple[str, int], Credited]:
    """By (state, action) of the first rollout at `turn`."""
    q, v = tree.action_values(policy), tree.values(policy)
    sums: dict[tuple[str, int], tuple[float, float, float]] = {}
    for chance, group in groups:
        for credit in algorithm.credit(group):
            if credit.sibling == 0 and credit.record.turn == turn:
                state = credit.record.state_hash
                key = state, tree.actions[state].index(credit.record.response_ids)
                error = (credit.advantage - (q[state][key[1]] - v[state])) ** 2
                p, mean, squares = sums.get(key, (0.0, 0.0, 0.0))
                sums[key] = p + chance, mean + chance * credit.advantage, squares + chance * error
    return {key: Credited(p, mean / p, squares / p) for key, (p, mean, squares) in sums.items()}


def siblings_at(tree: Tree, policy: Probabilities, state: str, n: int) -> dict[tuple[str, int], Credited]:
    """RTPO's credit of n siblings from `state`."""
    return credited(tree, policy, algorithms.make("rtpo", {}), groups_of(tree, policy, state, n), tree.turn[state])


def rollouts_at(tree: Tree, policy: Probabilities, method: str, n: int, turn: int) -> dict[tuple[str, int], Credited]:
    """A flat method's credit of n whole rollouts, at `turn`."""
    return credited(tree, policy, algorithms.make(method, {}), groups_of(tree, policy, tree.root, n, whole=True), turn)


def closed_form(tree: Tree, policy: Probabilities, state: str, action: int, n: int) -> float:
    """Mean squared error of n siblings: (1 - 1/n)^2 Var(R|S,u) + ((n-1)/n^2) Var(R|S) + (A/n)^2."""
    plays = list(tree.plays(policy, state))
    own = [play for play in plays if play.steps[0][1] == action]
    share = sum(play.chance for play in own)
    given = [(play.chance / share, play.reward) for play in own]
    advantage = tree.action_values(policy)[state][action] - tree.values(policy)[state]
    spread = (1 - 1 / n) ** 2 * _variance(given) + (n - 1) / n**2 * _variance([(play.chance, play.reward) for play in plays])
    return spread + (advantage / n) ** 2


def wrong_sign(pipeline: Pipeline) -> list[Line]:
    """The better action's branch lends its return to the worse action: the trajectory's advantage of (R, b) has the wrong sign."""
    policy = WORKED.uniform()
    bad = "R", 1
    true = WORKED.action_values(policy)["R"][1] - WORKED.values(policy)["R"]
    lines = [
        Line("A(R, b)", -0.1, true),
        Line("E[trajectory advantage of (R, b)], Dr.GRPO, G = 4", 0.225, rollouts_at(WORKED, policy, "drgrpo", 4, 1)[bad].mean),
        Line("the same, RLOO (unbiased for V of the task)", 0.3, rollouts_at(WORKED, policy, "rloo", 4, 1)[bad].mean),
        Line("the same, GRPO", 0.0, rollouts_at(WORKED, policy, "grpo", 4, 1)[bad].mean, sign=">"),
        Line("E[sibling advantage of (R, b)], RTPO, n = 2", -0.05, siblings_at(WORKED, policy, "R", 2)[bad].mean)]
    for n, share in ((1, 0.0), (2, 1 / 2), (3, 2 / 3), (4, 3 / 4)):
        lines.append(Line(f"E[sibling advantage] / A, n = {n}", share, siblings_at(WORKED, policy, "R", n)[bad].mean / true))
    for name, tree, trajectory, sibling in (("Bernoulli", WORKED, 0.49 / 3, 0.045), ("deterministic", WORKED_SURE, 0.11, 0.005)):
        lines += [Line(f"squared error of 3 trajectories, {name}", trajectory, _error(rollouts_at(tree, policy, "drgrpo", 3, 1))),
                  Line(f"squared error of 2 siblings, {name}", sibling, _sibling_error(tree, policy, 2))]
    return lines


def not_universal(pipeline: Pipeline) -> list[Line]:
    """Where the branches are worth the same, siblings only halve the sample."""
    policy = EVEN.uniform()
    return [Line("squared error of 3 trajectories", 0.0817, _error(rollouts_at(EVEN, policy, "drgrpo", 3, 1)), within=1e-6),
            Line("squared error of 2 siblings", 0.122525, _sibling_error(EVEN, policy, 2))]


def closed_form_of_the_error(pipeline: Pipeline) -> list[Line]:
    """The formula against enumeration, largest difference over a state's actions."""
    lines = []
    for name, tree, policy in (("worked tree", WORKED, WORKED.uniform()), ("even tree", EVEN, EVEN.uniform()), ("deep tree", DEEP, SKEWED)):
        for state in (tree.root, "R"):
            gap = max(abs(one.error - closed_form(tree, policy, state, action, n))
                      for n in (1, 2, 3) for (_, action), one in siblings_at(tree, policy, state, n).items())
            lines.append(Line(f"enumerated - closed form, {name}, {state}, n = 1 to 3", 0.0, gap))
    return lines


def baselines(pipeline: Pipeline) -> list[Line]:
    """R = (1, 0, 0, 1)."""
    group = _chains([[1], [0], [0], [1]])
    return [Line(f"A of a 1, {name}", expected, algorithms.make(name, {}).credit(group)[0].advantage, within=2e-6)
            for name, expected in (("grpo", 0.75**0.5), ("rloo", 2 / 3), ("drgrpo", 0.5))]


def tree_baseline(pipeline: Pipeline) -> list[Line]:
    """TreeGRPO: z over the task's leaves + z over the tree's."""
    lines = []
    for trees, expected in (([[1, 0], [1, 0]], (1.5731, -1.5731, 1.5731, -1.5731)), ([[1, 1], [0, 0]], (0.8660, 0.8660, -0.8660, -0.8660)),
                            ([[1, 0], [0, 0]], (2.2071, -1.2071, -0.5, -0.5))):
        group = _chains(trees)
        last = {credit.sibling: credit.advantage for credit in algorithms.make("treegrpo", {}).credit(group)}
        gap = max(abs(last[index] - value) for index, value in enumerate(expected))
        lines.append(Line(f"leaves {trees}: largest distance from {expected}", 0.0, gap, within=6e-5))
    return lines


def zero_advantage(pipeline: Pipeline) -> list[Line]:
    """Share of groups that the pipeline filters because all returns are equal: p^n + (1-p)^n."""
    lines = []
    for n, p, expected in ((2, 0.5, 0.5), (2, 0.1, 0.82), (3, 0.5, 0.25), (3, 0.1, 0.73)):
        tree = Tree({"start": (Coin(p), Coin(p))})
        groups = list(groups_of(tree, tree.uniform(), "start", n))
        table = pipeline.credit.credit_groups(pipeline.rows.groups_to_table([group for _, group in groups]), algorithm=algorithms.make("rtpo", {}))
        filtered = {row["group_id"] for row in table.to_pylist() if row["reason"] == "zero_advantage"}
        lines.append(Line(f"zero-advantage rate, n = {n}, p = {p}", expected, sum(chance for chance, group in groups if group.group_id in filtered)))
    return lines


def adaptive_budget(pipeline: Pipeline) -> list[Line]:
    """Pilots first, the rest of the group by what they returned: the expected update is the fixed allocation's."""
    lines = []
    for name, tree, policy, n, explore in (("worked tree", WORKED, WORKED.uniform(), 3, 0.5), ("deep tree", DEEP, SKEWED, 3, 0.2)):
        fixed, adaptive = (algorithms.make("rtpo", {"n_siblings": n, **options}).stages(tree.turns)
                           for options in ({}, {"sibling_budget": "adaptive", "pilots": 2, "explore": explore}))
        for one, other in zip(fixed, adaptive, strict=True):
            expected, found = (_expected(pipeline, tree, policy, stage) for stage in (one, other))
            gap = max(abs(a - b) for state in tree.moves for a, b in zip(expected[state], found[state], strict=True))
            lines.append(Line(f"adaptive - fixed expected update, turn {one.turn} of the {name}, largest entry", 0.0, gap, within=1e-12))
    stage = algorithms.make("rtpo", {"n_siblings": 3, "sibling_budget": "adaptive", "pilots": 2, "explore": 0.5}).stages(1)[0]
    sure, coin = Tree({"start": (1.0, 0.0)}), Tree({"start": (Coin(0.1), Coin(0.1))})
    whole, naive = (_expected(pipeline, sure, sure.uniform(), stage, divided)["start"][0] for divided in (True, False))
    lines += [Line("expected update, R = 1 or 0 by the action, n = 3: (1 - 1/n) / 4", 1 / 6, whole),
              Line("the same when the chance is not divided by", 5 / 36, naive)]
    groups = list(extended_groups(coin, coin.uniform(), "start", replace(stage, n_siblings=4)))
    size = sum(chance * len(group.siblings) for chance, group in groups)
    return [*lines, Line("siblings a boundary, p = .1, 2 pilots of 4: 2 + 2 (1 - .5 (p^2 + (1-p)^2))", 3.18, size)]


def _expected(pipeline: Pipeline, tree: Tree, policy: Probabilities, stage: Stage, divided: bool = True) -> dict[str, tuple[float, ...]]:
    """The expected update of a stage. `divided`: False credits groups as if each had been sure to get what it got."""
    groups = boundary_groups(tree, policy, tree.reach(policy), stage)
    known = groups if divided else ((chance, replace(group, chance=1.0)) for chance, group in groups)
    return pull(weighed_samples(pipeline, algorithms.make("rtpo", {}), known), tree, policy)


def _error(found: dict[tuple[str, int], Credited]) -> float:
    return sum(one.chance * one.error for one in found.values()) / sum(one.chance for one in found.values())


def _sibling_error(tree: Tree, policy: Probabilities, n: int) -> float:
    """Over both states of turn 1, by how often they are reached."""
    reach = tree.reach(policy)
    return sum(reach[state] * _error(siblings_at(tree, policy, state, n)) for state in ("L", "R"))


def _variance(pairs: list[tuple[float, float]]) -> float:
    mean = sum(p * value for p, value in pairs)
    return sum(p * (value - mean) ** 2 for p, value in pairs)


def _chains(trees: list[list[int]]) -> Group:
    """A task's group: of every tree a trunk of two turns and, for each further leaf, a branch from its turn 1."""
    tree = Tree({"start": ("end",), "end": (0.0,)})
    rollouts = []
    for number, leaves in enumerate(trees):
        for index, value in enumerate(leaves):
            steps = (("start", 0), ("end", 0)) if index == 0 else (("end", 0),)
            rollouts.append(tree.rollout(Play(1.0, steps, float(value)), tree.uniform(), rollout_id=f"{number}/1/{index}" if index else str(number),
                                         task_id=TASK, parent=str(number) if index else ""))
    return Group(group_id=TASK, task_id=TASK, turn=None, siblings=tuple(rollouts))
