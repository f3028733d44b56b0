"""Stages on a tree through the shipped objects: `algorithm.credit` by way of the pipeline's functions, and the real `Learner`.

    exact      every group that could be sampled, each weighed by its probability: the update is then its own expectation
    sampled    trunks ─► for each stage: requests ─► siblings ─► groups ─► credit ─► update ─► weights, as in actors/coordinator.py

The science never imports the pipeline, so its functions come in as a `Pipeline`.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from rtpo_ray.algorithms.base import Algorithm, Objective, Stage
from rtpo_ray.algorithms.budget import chance_of_more, is_extended
from rtpo_ray.config import LearnerConfig
from rtpo_ray.policy import modeling
from rtpo_ray.policy.learner import Learner, init_distributed
from rtpo_ray.theory.tabular import TabularPolicy
from rtpo_ray.theory.tree import Probabilities, Tree
from rtpo_ray.types import Group, Rollout, Sample, UpdateResult, derive_seed

TASK = "tree"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The modules of `pipelines` by name: records to tables, where siblings branch off, credit, counts."""

    rows: ModuleType
    branching: ModuleType
    credit: ModuleType
    counts: ModuleType


@contextmanager
def process_group() -> Iterator[None]:
    """A default process group of this process alone, unless there is one."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        init_distributed(0, 1, f"file://{folder}/group", "cpu", 20)
        try:
            yield
        finally:
            dist.destroy_process_group()


def plain_steps(rate: float) -> LearnerConfig:
    """AdamW as gradient descent at `rate`: with a vast eps and no momentum a step is lr / eps times the gradient, whatever came before."""
    return LearnerConfig(lr=rate * 1e6, eps=1e6, beta1=0.0, weight_decay=0.0, max_grad_norm=1e9)


def adam(rate: float) -> LearnerConfig:
    """AdamW as in training, without weight decay."""
    return LearnerConfig(lr=rate, weight_decay=0.0)


def make_learner(tree: Tree, objective: Objective, config: LearnerConfig, start: Probabilities | None = None) -> Learner:
    """The real learner on one rank, with a table in the place of a model. Inside `process_group` only."""
    policy = TabularPolicy(tree, start, value_head=objective.critic is not None)
    return Learner("", config, objective=objective, dtype="float32", temperature=1.0, device="cpu", policy=policy)


def policy_of(learner: Learner, tree: Tree) -> dict[str, tuple[float, ...]]:
    """The learner's present policy, from its own scores."""
    pairs = [(state, action) for state, actions in tree.actions.items() for action in actions]
    scores = learner.score([(tree.context(state), action) for state, action in pairs])
    found: dict[str, list[float]] = {}
    for (state, _), logprobs in zip(pairs, scores, strict=True):
        found.setdefault(state, []).append(math.exp(sum(logprobs)))
    return {state: tuple(p / sum(own) for p in own) for state, own in found.items()}


def logits_of(learner: Learner) -> torch.Tensor:
    """A copy of the table [prefixes, tokens], float64."""
    return next(value.double().clone() for _, value in modeling.full_parameters(learner.policy))


def movement(learner: Learner, act: Callable[[], object]) -> torch.Tensor:
    """What `act` adds to the table [prefixes, tokens], which is put back afterwards. With `plain_steps(1)`: the gradient of the objective."""
    weight, before = learner.policy.lm.weight, logits_of(learner)
    kept = weight.detach().clone()
    act()
    moved = logits_of(learner) - before
    with torch.no_grad():
        weight.copy_(kept)
    return moved


# --- exact


def groups_of(tree: Tree, policy: Probabilities, state: str, n: int, *, whole: bool = False) -> Iterator[tuple[float, Group]]:
    """Every (probability, group) of n independent plays from `state`; `whole`: a group of whole rollouts instead of siblings of a turn."""
    plays = list(tree.plays(policy, state))
    for number, chosen in enumerate(itertools.product(plays, repeat=n)):
        name = f"{TASK}/{state}/{number}"
        siblings = tuple(tree.rollout(play, policy, rollout_id=f"{name}/{index}", task_id=TASK, parent="" if whole else "trunk")
                         for index, play in enumerate(chosen))
        group = Group(group_id=name, task_id=TASK, turn=None if whole else tree.turn[state], siblings=siblings)
        yield math.prod(play.chance for play in chosen), group


def extended_groups(tree: Tree, policy: Probabilities, state: str, stage: Stage) -> Iterator[tuple[float, Group]]:
    """Every (probability, group) of pilots from `state` and, by the coin of `algorithms.budget`, of the rest."""
    for first, group in groups_of(tree, policy, state, stage.pilots):
        chance = chance_of_more([sibling.returns_to_go for sibling in group.siblings], stage.explore)
        group = replace(group, pilots=stage.pilots, chance=chance)
        if chance < 1:
            yield first * (1 - chance), group
        for second, rest in groups_of(tree, policy, state, stage.n_siblings - stage.pilots):
            name = f"{group.group_id}+{rest.group_id}"
            more = tuple(replace(sibling, rollout_id=f"{name}/{stage.pilots + index}") for index, sibling in enumerate(rest.siblings))
            kept = tuple(replace(sibling, rollout_id=f"{name}/{index}") for index, sibling in enumerate(group.siblings))
            yield first * chance * second, replace(group, group_id=name, siblings=(*kept, *more))


def boundary_groups(tree: Tree, policy: Probabilities, reach: Mapping[str, float], stage: Stage) -> Iterator[tuple[float, Group]]:
    """The groups of one RTPO stage: of every state at its turn, by its probability `reach` among the trunks."""
    for state in tree.moves:
        if tree.turn[state] == stage.turn:
            groups = extended_groups(tree, policy, state, stage) if stage.pilots else groups_of(tree, policy, state, stage.n_siblings)
            yield from ((reach[state] * chance, group) for chance, group in groups)


def weighed_samples(pipeline: Pipeline, algorithm: Algorithm, groups: Iterable[tuple[float, Group]]) -> list[Sample]:
    """The samples of these groups, credited by `algorithm`; each weighs its group's probability times its own share of the group."""
    pairs = list(groups)
    chances = {group.group_id: chance for chance, group in pairs}
    credited = pipeline.credit.credit_groups(pipeline.rows.groups_to_table([group for _, group in pairs]), algorithm=algorithm)
    return [replace(sample, weight=sample.weight * chances[sample.group_id]) for sample in pipeline.credit.samples_to_train(credited)]


def pull(samples: Iterable[Sample], tree: Tree, policy: Probabilities) -> dict[str, tuple[float, ...]]:
    """Gradient of the objective at `policy` with respect to the logits of one-token actions, by state: what a first step goes along, in
    float64. A sample of action u adds weight x advantage x (1[u] - pi)."""
    states = {tree.context(state): state for state in tree.moves}
    found = {state: [0.0] * len(own) for state, own in tree.actions.items()}
    for sample in samples:
        state = states[tuple(sample.context_ids)]
        taken = tree.actions[state].index(tuple(sample.response_ids))
        for index, p in enumerate(policy[state]):
            found[state][index] += sample.weight * sample.advantage * ((index == taken) - p)
    return {state: tuple(own) for state, own in found.items()}


def exact_stage(pipeline: Pipeline, algorithm: Algorithm, learner: Learner, tree: Tree, stage: Stage, reach: Mapping[str, float], steps: int) -> None:
    """Train one boundary stage for `steps` on-policy updates, every one the expectation over what could be sampled."""
    assert stage.turn is not None
    for _ in range(steps):
        groups = boundary_groups(tree, policy_of(learner, tree), reach, stage)
        learner.update(weighed_samples(pipeline, algorithm, groups), 1, stage.n_siblings, seed=0)


# --- sampled


def sampled_sweep(
    pipeline: Pipeline, algorithm: Algorithm, learner: Learner, tree: Tree, served: Probabilities, *, tasks: int, seed: int,
) -> Probabilities:
    """One sweep as the coordinator runs it, from trunks to the last weight push. `served`: what the generators hold; returns what they hold now."""
    trunks = sampled_trunks(algorithm, tree, served, tasks=tasks, seed=seed)
    reached = {boundary.turn for trunk in trunks for boundary in trunk.boundaries}
    behind = False
    for number, stage in enumerate(algorithm.stages(tree.turns)):
        if stage.turn is not None and stage.turn not in reached:
            continue
        result = sampled_stage(pipeline, algorithm, learner, tree, served, trunks, stage, derive_seed(seed, number))
        behind = behind or result.optimizer_steps > 0
        if behind and stage.publish:
            served, behind = policy_of(learner, tree), False
    return policy_of(learner, tree) if behind else served


def sampled_trunks(algorithm: Algorithm, tree: Tree, served: Probabilities, *, tasks: int, seed: int) -> list[Rollout]:
    """`n_trunks` whole rollouts of every task; every task is the same tree."""
    rng = random.Random(derive_seed(seed, "trunks"))
    return [_play(tree, served, rng, rollout_id=f"task-{task}/{trunk}", task_id=f"task-{task}", boundaries=algorithm.branching)
            for task in range(tasks) for trunk in range(algorithm.n_trunks)]


def sampled_stage(
    pipeline: Pipeline, algorithm: Algorithm, learner: Learner, tree: Tree, served: Probabilities, trunks: Sequence[Rollout], stage: Stage,
    seed: int,
) -> UpdateResult:
    """Requests, siblings, groups, credit, update."""
    rng = random.Random(derive_seed(seed, "siblings"))
    table = pipeline.rows.rollouts_to_table(trunks)
    wanted = pipeline.branching.requests(table, stage, algorithm, derive_seed(seed, "requests"))
    made = pipeline.rows.groups_to_table(_siblings(tree, served, rng, row) for row in wanted.to_pylist())
    credited = pipeline.credit.credit_groups(pipeline.branching.assemble(table, made, stage), algorithm=algorithm)
    counts = pipeline.counts.count_stage(credited)
    return learner.update(pipeline.credit.samples_to_train(credited), counts.groups, counts.comparable, derive_seed(seed, "update"))


def train(pipeline: Pipeline, algorithm: Algorithm, tree: Tree, config: LearnerConfig, *, sweeps: int, tasks: int, seed: int) -> list[float]:
    """The policy's exact expected return before the first sweep and after each, from a uniform start."""
    learner = make_learner(tree, algorithm.objective, config)
    served: Probabilities = tree.uniform()
    returns = [tree.value(served)]
    for sweep in range(sweeps):
        served = sampled_sweep(pipeline, algorithm, learner, tree, served, tasks=tasks, seed=derive_seed(seed, sweep))
        returns.append(tree.value(served))
    return returns


def _siblings(tree: Tree, policy: Probabilities, rng: random.Random, row: Mapping[str, Any]) -> Group:
    """What a generator samples for one row of REQUESTS."""
    boundary, name, pilots = row["boundary"], str(row["group_id"]), int(row["count"])

    def play(index: int) -> Rollout:
        return _play(tree, policy, rng, rollout_id=f"{name}/{index}", task_id=str(row["task_id"]), parent=str(row["parent"]),
                     state=boundary["snapshot"].decode())

    siblings = [play(index) for index in range(pilots)]
    group = Group(group_id=name, task_id=str(row["task_id"]), turn=boundary["turn"], siblings=tuple(siblings))
    if not row["more"]:
        return group
    returns = [sibling.returns_to_go for sibling in siblings]
    if is_extended(returns, row["explore"], rng.getrandbits(31)):
        siblings += [play(index) for index in range(pilots, pilots + row["more"])]
    return replace(group, siblings=tuple(siblings), pilots=pilots, chance=chance_of_more(returns, row["explore"]))


def _play(tree: Tree, policy: Probabilities, rng: random.Random, *, rollout_id: str, task_id: str, parent: str = "", state: str = "",
          boundaries: bool = False) -> Rollout:
    return tree.rollout(tree.sample(policy, rng, state), policy, rollout_id=rollout_id, task_id=task_id, parent=parent, boundaries=boundaries)
