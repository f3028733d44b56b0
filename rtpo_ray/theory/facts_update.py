"""Facts about ratios and updates: `rtpo_ray.objectives` on numbers, and single updates of the real learner."""

from __future__ import annotations

import math
from functools import partial

import torch

from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.objectives import carried_ratio, gae, token_losses, token_ratios
from rtpo_ray.theory.lab import (
    TASK,
    Pipeline,
    boundary_groups,
    groups_of,
    make_learner,
    movement,
    plain_steps,
    process_group,
    sampled_stage,
    sampled_trunks,
    weighed_samples,
)
from rtpo_ray.theory.line import Line
from rtpo_ray.theory.tree import Probabilities, Tree
from rtpo_ray.types import Group

ORDER = Tree({"start": ("L", "R"), "L": (1.0, 0.0), "R": (0.6, 0.6)})
ORDER_2 = Tree({"start": ("L", "R"), "L": (1.0, 0.0), "R": (0.6, 0.6)}, {"L": ((0, 0), (1, 0))})  # L's responses have two tokens, the second forced
TRAP = Tree({"start": ("left", "right"), "left": ("deep", "waste"), "right": ("safe", "fair"),
             "deep": (1.0, 0.0), "waste": (0.2, 0.0), "safe": (0.6, 0.5), "fair": (0.5, 0.6)})
STALE = Tree({"start": ("S", 0.7), "S": (1.0, 0.2)})


def carried_advantage(pipeline: Pipeline) -> list[Line]:
    """SeeUPO: one group that holds every rollout as often as it is sampled, so that mean(R) is V; then turn 1 at L moves to (.9, .1)."""
    lines = []
    for name, tree, options, left, right in (
        ("product", ORDER, {}, 0.35, 0.05), ("product clipped at .2", ORDER, {"carry_clip": 0.2}, 0.05, 0.05),
        ("geometric mean of two tokens", ORDER_2, {"carry": "geometric"}, 0.178885, 0.05)):
        method = algorithms.make("seeupo", {"normalisation": "none", **options})
        group = _every_rollout(tree)
        la, lb, ra, rb = (credit.advantage for credit in method.credit(group) if credit.record.turn == 0)
        if name == "product":
            lines += [Line("E[A|L]", -0.05, (la + lb) / 2), Line("E[A|R]", 0.05, (ra + rb) / 2)]
        turns = method.objective.turns
        assert turns is not None
        forced = [0.0] * (len(tree.actions["L"][0]) - 1)
        up, down = (float(carried_ratio(torch.tensor([math.log(p / 0.5), *forced], dtype=torch.float64), mode=turns.carry, clip=turns.carry_clip))
                    for p in (0.9, 0.1))
        lines += [Line(f"E[M|L], {name}", left, (up * la + down * lb) / 2, within=1e-6),
                  Line(f"E[M|R], {name}", right, (ra + rb) / 2)]
        rate = math.log(9) / 0.25 * len(tree.actions["L"][0])  # brings L from (.5, .5) to (.9, .1) in one step
        with process_group():
            learner = make_learner(tree, method.objective, plain_steps(rate))
            moved = movement(learner, partial(learner.update, weighed_samples(pipeline, method, [(1.0, group)]), 1, 4, 0))
        lines += [Line(f"log odds of L's first action after the update, {name}", math.log(9), float(moved[2, 0] - moved[2, 1]), within=1e-4),
                  Line(f"E[M|L] - E[M|R] that the learner steps along at the root, {name}", left - right, float(moved[1, 0]) * 4 / rate, within=1e-5)]
    return lines


def clipping(pipeline: Pipeline) -> list[Line]:
    """eps = .2: where the clip sits makes another number."""
    two, ten = (torch.tensor(ratios, dtype=torch.float64).log() for ratios in ([1.5, 0.5], [1.1] * 10))
    objective = algorithms.make("rtpo", {}).objective
    ratios = token_ratios(two, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), level=objective.ratio)
    good, bad = (-token_losses(ratios, torch.full((2,), sign, dtype=torch.float64), objective)[0] for sign in (1.0, -1.0))
    return [
        Line("rho = (1.5, .5): product", 0.75, float(carried_ratio(two, mode="product", clip=0.0))),
        Line("product of clips", 0.96, math.prod(float(carried_ratio(value[None], mode="product", clip=0.2)) for value in two)),
        Line("clip of the product", 0.8, float(carried_ratio(two, mode="product", clip=0.2))),
        Line("RTPO's gain of both tokens, A = 1: min of each with its own clip", 1.2 + 0.5, float(good.sum())),
        Line("the same, A = -1", -1.5 - 0.8, float(bad.sum())),
        Line("rho = 1.1 ten times: product", 2.5937, float(carried_ratio(ten, mode="product", clip=0.0)), within=5e-5),
        Line("clip of the product", 1.2, float(carried_ratio(ten, mode="product", clip=0.2)))]


def drift(pipeline: Pipeline) -> list[Line]:
    """Variance of the product weight when (.5, .5) became (.6, .4), over all 2^N responses, counted by their number of first tokens."""
    lines = []
    for (p, q), tokens, expected in (((0.6, 0.4), 1, 0.04), ((0.6, 0.4), 10, 0.48024), ((0.6, 0.4), 100, 49.505), ((0.5, 0.5), 100, 0.0)):
        first, second = (torch.tensor(math.log(value / 0.5), dtype=torch.float64) for value in (p, q))
        mean = square = 0.0
        for count in range(tokens + 1):
            weight = float(carried_ratio(torch.stack([first] * count + [second] * (tokens - count)), mode="product", clip=0.0))
            chance = math.comb(tokens, count) / 2**tokens
            mean, square = mean + chance * weight, square + chance * weight**2
        lines.append(Line(f"Var of the weight, ({p}, {q}), {tokens} tokens", expected, square - mean**2, within=5e-6 if tokens < 100 else 5e-4))
    return lines


def sequence_ratio(pipeline: Pipeline) -> list[Line]:
    """GSPO, dlogp = (.2, -.1)."""
    changes = torch.tensor([0.2, -0.1], dtype=torch.float64)
    level = algorithms.make("gspo", {}).objective.ratio
    found = token_ratios(changes, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), level=level)
    return [Line("s of the first token", 1.05127, float(found[0]), within=5e-6), Line("s of the second token", 1.05127, float(found[1]), within=5e-6),
            Line("the product", 1.10517, float(carried_ratio(changes, mode="product", clip=0.0)), within=5e-6)]


def advantage_estimation(pipeline: Pipeline) -> list[Line]:
    """GAE of r = (0, 0, 1), V = (.5, .6, .8), gamma 1."""
    rewards, values = (torch.tensor(numbers, dtype=torch.float64) for numbers in ([0, 0, 1], [0.5, 0.6, 0.8]))
    lines = []
    for lam, expected in ((1.0, (0.5, 0.4, 0.2)), (0.95, (0.4705, 0.39, 0.2))):
        critic = algorithms.make("ppo", {"lam": lam}).objective.critic
        assert critic is not None
        found = gae(rewards, values, gamma=critic.gamma, lam=critic.lam).tolist()
        lines += [Line(f"A_{step}, lambda {lam}", value, found[step]) for step, value in enumerate(expected)]
    return lines


def gradients_agree(pipeline: Pipeline, batches: int = 40, tasks: int = 40) -> list[Line]:
    """RTPO's expected gradient is the policy gradient times 1 - 1/n, and the mean of sampled ones goes there."""
    n, stage = 2, Stage(turn=1, n_siblings=2, baseline="boundary", with_trunk=False)
    method = algorithms.make("rtpo", {"n_siblings": n})
    policy: Probabilities = {**TRAP.uniform(), "start": (0.7, 0.3), "left": (0.4, 0.6), "deep": (0.8, 0.2)}
    reach, true = TRAP.reach(policy), torch.zeros(len(TRAP.moves) + 1, 2, dtype=torch.float64)
    for state, values in TRAP.gradient(policy, reach).items():
        if TRAP.turn[state] == stage.turn:
            true[TRAP.number[state]] = torch.tensor(values, dtype=torch.float64)
    with process_group():
        learner = make_learner(TRAP, method.objective, plain_steps(1.0), policy)
        samples = weighed_samples(pipeline, method, boundary_groups(TRAP, policy, reach, stage))
        exact = movement(learner, partial(learner.update, samples, 1, n, 0))
        sampled = torch.stack([movement(learner, partial(
            sampled_stage, pipeline, method, learner, TRAP, policy, sampled_trunks(method, TRAP, policy, tasks=tasks, seed=seed), stage, seed))
            for seed in range(batches)])
    mean, error = sampled.mean(0), sampled.std(0) / batches**0.5
    others = [number for number in range(len(true)) if number not in (TRAP.number["left"], TRAP.number["right"])]
    rows = [TRAP.number["left"], TRAP.number["right"]]
    away = [float(((mean - target)[rows] / error[rows]).abs().max()) for target in (true * (1 - 1 / n), true)]
    return [Line("exact update - (1 - 1/n) policy gradient, largest entry", 0.0, float((exact - true * (1 - 1 / n)).abs().max()), within=1e-6),
            Line(f"mean of {batches} sampled gradients, standard errors from it", 4.5, away[0], sign="<"),
            Line("standard errors from the policy gradient itself, without that factor", 4.5, away[1], sign=">"),
            Line("sampled gradient of any other turn, largest entry", 0.0, float(mean[others].abs().max()))]


def stale_continuations(pipeline: Pipeline) -> list[Line]:
    """start: S or .7 at once; S: 1 or .2. Sampled by (.5, .5) at S, learned when S has become (.8, .2): Q(S) is .84, and .6 to whoever sampled.

    Q(S) is read off the root's gradient, pi (1 - pi) (1 - 1/n) (Q(S) - .7). Clamped above at 1.2 it is .5 (1.2 * 1 + .4 * .2) = .64.
    """
    old, new = STALE.uniform(), {**STALE.uniform(), "S": (0.8, 0.2)}
    lines = [Line("true Q(S)", 0.84, STALE.action_values(new)["start"][0])]
    for low, high, expected in ((0.0, 100.0, 0.84), (0.0, 1.2, 0.64), (1.0, 1.0, 0.6)):
        name = f"weights clamped to ({low:g}, {high:g})"
        method = algorithms.make("rtpo", {"sync_every": 0, "n_siblings": 2, "rho_min": low, "rho_max": high})
        with process_group():
            learner = make_learner(STALE, method.objective, plain_steps(1.0), new)
            samples = weighed_samples(pipeline, method, groups_of(STALE, old, "start", 2))
            moved = movement(learner, partial(learner.update, samples, 1, 2, 0))
        lines += [Line(f"E[Q(S)], {name}", expected, 0.7 + float(moved[1, 0]) / (0.25 * 0.5), within=1e-5),
                  Line(f"gradient at S, {name}", 0.0, float(moved[2].abs().max()))]
    return lines


def _every_rollout(tree: Tree) -> Group:
    """One group of all plays of the uniform policy, which are equally likely here."""
    policy = tree.uniform()
    rollouts = tuple(tree.rollout(play, policy, rollout_id=str(index), task_id=TASK) for index, play in enumerate(tree.plays(policy)))
    return Group(group_id=TASK, task_id=TASK, turn=None, siblings=rollouts)
