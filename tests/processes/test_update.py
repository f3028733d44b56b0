"""Every option of an objective on 1, 2 and 3 gloo ranks: its steps equal gradient descent written down directly with transformers.

AdamW is configured so that a step subtracts `RATE` times the gradient itself. All cases of a world run in one call.
"""

import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from gloo import folder, learner_config, run_ranks, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from rtpo_ray.algorithms.base import Critic, Objective, TurnOrder
from rtpo_ray.objectives import gae
from rtpo_ray.policy.learner import Learner
from rtpo_ray.types import Sample, context_hash

TEMPERATURE = 0.7
N_GROUPS, N_ROLLOUTS = 4, 11  # of the whole stage: a group of two rollouts had equal returns and is not here
RATE = 0.005
WORLDS = {1: 1000, 2: 120, 3: 64}  # ranks -> tokens of a micro-batch


# --- samples


def make_flat():
    """Three groups of three rollouts of 1 to 3 turns; some contexts grow by what came before, so that responses share a sequence.

    Engine log-probabilities are those of the model moved by up to +/-.6, so that ratios against the engine leave the clip range.
    """
    rng = random.Random(1)
    samples = []
    for g in range(3):
        for j in range(3):
            context, advantage, name = [rng.randrange(64) for _ in range(rng.randint(2, 5))], rng.choice((-1, 1)) * rng.uniform(0.5, 1.5), f"g{g}/{j}"
            for turn in range(1 + (g + j) % 3):
                response = [rng.randrange(64) for _ in range(rng.randint(1, 4))]
                samples.append(Sample(
                    sample_id=f"{name}:{turn}", rollout_id=name, group_id=f"g{g}", turn=turn, reward=rng.uniform(-1, 1), context_ids=context,
                    context_hash=context_hash(context), response_ids=response, engine_logprobs=[0.0] * len(response), advantage=advantage,
                    weight=rng.choice((0.25, 0.5))))
                feedback = [rng.randrange(64) for _ in range(rng.randint(0, 3))]
                context = [*context, *response, *feedback] if j < 2 else [rng.randrange(64) for _ in range(rng.randint(2, 9))]
    exact = [part.tolist() for part in Plain().logprobs(samples)]
    return [replace(s, engine_logprobs=[value + rng.uniform(-0.6, 0.6) for value in part]) for s, part in zip(samples, exact, strict=True)]


def make_pairs():
    """Three pairs on one turn each; a rollout of the first has a summary of its turn beside the response."""
    samples = [s for s in flat() if s.turn == 0 and not s.rollout_id.endswith("/2")]
    samples = [replace(s, advantage=(0.5, 0.2, -0.35)[int(s.group_id[1])] * (1 if s.rollout_id.endswith("/0") else -1), weight=0.5) for s in samples]
    first = replace(samples[0], weight=0.3)
    summary = replace(first, sample_id="g0/0:0s", context_ids=[5, 6, 7], context_hash=context_hash([5, 6, 7]), response_ids=[9, 11],
                      engine_logprobs=[-1.0, -1.0], weight=0.2)
    return [first, summary, *samples[1:]]


def make_continued():
    """Groups on turn 0 whose later turns are scored only: weight 0."""
    return [s if s.turn == 0 else replace(s, weight=0.0, advantage=0.0) for s in flat()]


def make_three():
    """Three rollouts of one group, with 1 to 3 responses."""
    return [s for s in flat() if s.group_id == "g0"]


flat, pairs, continued, three = map(functools.cache, (make_flat, make_pairs, make_continued, make_three))


# --- the same by transformers alone


class Plain:
    """The model, a value head when asked for, and gradient descent."""

    def __init__(self, value_head=False):
        self.lm = AutoModelForCausalLM.from_pretrained(tiny_model(layers=1), dtype=torch.float32).eval()
        self.head = torch.nn.Linear(32, 1) if value_head else None
        self.named = dict(self.lm.named_parameters())
        if self.head is not None:
            torch.nn.init.zeros_(self.head.weight)
            torch.nn.init.zeros_(self.head.bias)
            self.named |= {f"value_head.{name}": value for name, value in self.head.named_parameters()}
        self.start = {name: value.detach().clone() for name, value in self.named.items()}

    def both(self, samples):
        """Log-probabilities and values, [T] a sample: every sample in a row of its own."""
        rows = [[*s.context_ids, *s.response_ids] for s in samples]
        ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        output = self.lm(ids, output_hidden_states=True)
        logits, hidden = output.logits.float() / TEMPERATURE, output.hidden_states[-1]
        logprobs, values = [], []
        for row, s in enumerate(samples):
            places = torch.arange(len(s.context_ids), len(s.context_ids) + len(s.response_ids)) - 1
            logprobs.append(torch.log_softmax(logits[row, places], dim=-1)[torch.arange(len(places)), torch.tensor(s.response_ids)])
            values.append(self.head(hidden[row, places]).squeeze(-1) if self.head is not None else None)
        return logprobs, values

    def logprobs(self, samples):
        return self.both(samples)[0]

    @torch.no_grad()
    def kept(self, samples):
        return self.both(samples)

    def step(self, loss):
        loss.backward()
        with torch.no_grad():
            for value in self.named.values():
                if value.grad is not None:
                    value -= RATE * value.grad
                    value.grad = None

    def moved(self):
        return {name: (self.start[name] - value.detach()).double().numpy() for name, value in self.named.items()}


def surrogate(now, before, sample, advantage, *, low=0.2, high=0.2, dual=0.0, sequence=False, factor=1.0):
    """-weight / T sum_t of the clipped objective of one sample."""
    change = now - before
    ratio = torch.exp(change.mean().expand(len(change)) if sequence else change)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual and advantage < 0:
        gain = torch.maximum(gain, torch.tensor(dual * advantage))
    return -(sample.weight * gain * factor).mean()


def clipped(samples, steps=1, *, divisor=N_GROUPS, against_engine=False, advantages=None, extra=lambda sample, now, first: 0.0, tis=0.0, **options):
    """Steps on all samples at once."""
    plain = Plain()
    first, _ = plain.kept(samples)
    for _ in range(steps):
        losses = []
        for sample, now, start in zip(samples, plain.logprobs(samples), first, strict=True):
            if sample.weight == 0:
                continue
            engine = torch.tensor(sample.engine_logprobs)
            advantage = sample.advantage if advantages is None else advantages[sample.rollout_id]
            factor = torch.exp(start - engine).clamp(max=tis) if tis else 1.0
            loss = surrogate(now, engine if against_engine else start, sample, advantage, factor=factor, **options)
            losses.append(loss + extra(sample, now, start))
        plain.step(torch.stack(losses).sum() / divisor)
    return plain.moved()


def in_parts(parts):
    """One step for each of these sets of rollouts of `three`, which are a share of the samples and weigh as many times more."""
    plain, samples = Plain(), three()
    first, _ = plain.kept(samples)
    for part in parts:
        now = plain.logprobs(samples)
        losses = [surrogate(new, start, s, s.advantage, low=0.02 if len(parts) == 2 else 0.9, high=0.03 if len(parts) == 2 else 9.0)
                  for s, new, start in zip(samples, now, first, strict=True) if s.rollout_id in part]
        plain.step(torch.stack(losses).sum() * len(parts) / N_GROUPS)
    return plain.moved()


def kl(coef):
    def extra(sample, now, reference):
        d = reference - now
        return coef * sample.weight * (torch.exp(d) - d - 1).mean()
    return extra


def normalised(limit=None):
    """A / std over the stage's rollouts, as a dict by rollout; clamped to +/- limit."""
    values = {s.rollout_id: s.advantage for s in flat()}
    std = (sum(value**2 for value in values.values()) / N_ROLLOUTS) ** 0.5 + 1e-6
    return {name: value / std if limit is None else max(-limit, min(limit, value / std)) for name, value in values.items()}


def regressed(steps, eta=1.0, parts=None):
    """Steps on the squared error of pairs; `parts`: the groups of each step, which are then few and weigh as many times more."""
    plain, samples = Plain(), pairs()
    first, _ = plain.kept(samples)
    for part in parts or [("g0", "g1", "g2")] * steps:
        change = {}
        for sample, now, start in zip(samples, plain.logprobs(samples), first, strict=True):
            change[sample.rollout_id] = change.get(sample.rollout_id, 0.0) + (now - start).sum()
        target = {s.rollout_id: s.advantage for s in samples}
        errors = [(change[f"{g}/0"] - change[f"{g}/1"]) / eta - (target[f"{g}/0"] - target[f"{g}/1"]) for g in part]
        plain.step(sum(error**2 for error in errors) * (2 if parts else 1) / N_GROUPS)
    return plain.moved()


def turn_by_turn(order=(2, 1, 0), carry="product", carry_clip=0.0, advantages=None, epochs=1):
    """SeeUPO: one part a turn, all against the policy before the first; `carry` None: nothing is carried."""
    plain, samples = Plain(), flat()
    first, _ = plain.kept(samples)
    m = dict(advantages or {s.rollout_id: s.advantage for s in samples})
    for turn in order:
        part = [(s, start) for s, start in zip(samples, first, strict=True) if s.turn == turn]
        for _ in range(epochs):
            now = plain.logprobs([s for s, _ in part])
            losses = [surrogate(new, start, s, m[s.rollout_id], sequence=True) for (s, start), new in zip(part, now, strict=True)]
            plain.step(torch.stack(losses).sum() / N_GROUPS)
        for (s, start), new in zip(part, plain.kept([s for s, _ in part])[0], strict=True):
            ratio = {"product": torch.exp((new - start).sum()), "geometric": torch.exp((new - start).mean()), None: torch.tensor(1.0)}[carry]
            m[s.rollout_id] *= float(ratio.clamp(1 - carry_clip, 1 + carry_clip) if carry_clip else ratio)
    return plain.moved()


def continuations(low, high):
    """A by rollout: Q - mean Q of the group, Q = r_0 + clamp(prod rho, low, high) (r_1 + ...)."""
    q, exact = {}, Plain().kept(continued())[0]
    for g, j in itertools.product(range(3), range(3)):
        mine = [(s, part) for s, part in zip(continued(), exact, strict=True) if s.rollout_id == f"g{g}/{j}"]
        later = [(s, part) for s, part in mine if s.turn > 0]
        product = float(torch.exp(sum((part - torch.tensor(s.engine_logprobs)).sum() for s, part in later))) if later else 1.0
        q[f"g{g}/{j}"] = mine[0][0].reward + min(max(product, low), high) * sum(s.reward for s, _ in later)
    mean = {g: sum(value for name, value in q.items() if name.startswith(f"g{g}/")) / 3 for g in range(3)}
    return {name: value - mean[int(name[1])] for name, value in q.items()}


def with_critic(critic, updates, steps):
    """PPO, written down per rollout; every update takes its advantages from the values that the one before left behind."""
    plain, samples = Plain(value_head=True), flat()
    total = sum(s.weight for s in samples)
    for _ in range(updates):
        first, values = plain.kept(samples)
        advantages, targets, counted = [None] * len(samples), [None] * len(samples), [None] * len(samples)
        for name in {s.rollout_id for s in samples}:
            mine = [i for i, s in enumerate(samples) if s.rollout_id == name]
            if critic.level == "token":
                rewards = torch.cat([torch.tensor([0.0] * (len(samples[i].response_ids) - 1) + [samples[i].reward]) for i in mine])
                found = gae(rewards, torch.cat([values[i] for i in mine]), gamma=critic.gamma, lam=critic.lam)
                for i, part in zip(mine, found.split([len(samples[i].response_ids) for i in mine]), strict=True):
                    advantages[i], targets[i], counted[i] = part, part + values[i], torch.ones(len(part))
            else:
                rewards = torch.tensor([samples[i].reward for i in mine])
                found = gae(rewards, torch.stack([values[i][0] for i in mine]), gamma=critic.gamma, lam=critic.lam)
                for i, one in zip(mine, found, strict=True):
                    length = len(samples[i].response_ids)
                    advantages[i], targets[i] = one.expand(length), (one + values[i][0]).expand(length)
                    counted[i] = torch.tensor([float(length)] + [0.0] * (length - 1))  # the value of a turn is that of its first token
        if critic.whiten:
            every = torch.cat(advantages)
            advantages = [(part - every.mean()) / (every.std(correction=0) + 1e-8) for part in advantages]
        for _ in range(steps):
            loss = 0.0
            columns = (samples, *plain.both(samples), first, values, advantages, targets, counted)
            for sample, now, value, start, old, a, target, weight in zip(*columns, strict=True):
                ratio = torch.exp(now - start)
                policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                error = (value - target) ** 2
                if critic.clip:
                    error = torch.maximum(error, (old + (value - old).clamp(-critic.clip, critic.clip) - target) ** 2)
                loss = loss + sample.weight * (policy + critic.coef * 0.5 * weight * error).mean()
            plain.step(loss / total)
    return plain.moved()


# --- cases


@dataclass(frozen=True)
class Case:
    objective: Objective
    expected: Any  # () -> {parameter: what was subtracted}
    otherwise: Any = None  # () -> the same without the option: must be far from it
    samples: Any = flat
    updates: int = 1
    seed: int = 5


ENGINE = {"old_policy": "engine"}
CLIP = {"clip_low": 0.02, "clip_high": 0.03}
TURNS = TurnOrder()
CRITIC = Critic(gamma=0.9, lam=0.8, clip=0.05)

CASES = {
    "one step": Case(Objective(), lambda: clipped(flat())),
    "two epochs": Case(Objective(epochs=2, **CLIP), lambda: clipped(flat(), 2, low=0.02, high=0.03), lambda: clipped(flat(), 2)),
    "sequence ratio": Case(Objective(epochs=2, ratio="sequence", **CLIP), lambda: clipped(flat(), 2, low=0.02, high=0.03, sequence=True),
                           lambda: clipped(flat(), 2, low=0.02, high=0.03)),
    "engine": Case(Objective(**ENGINE), lambda: clipped(flat(), against_engine=True), lambda: clipped(flat())),
    "asymmetric clip": Case(Objective(clip_low=0.1, clip_high=0.5, **ENGINE), lambda: clipped(flat(), against_engine=True, low=0.1, high=0.5),
                            lambda: clipped(flat(), against_engine=True)),
    "sequence ratio to the engine": Case(Objective(ratio="sequence", **ENGINE), lambda: clipped(flat(), against_engine=True, sequence=True),
                                         lambda: clipped(flat(), against_engine=True)),
    "dual clip": Case(Objective(dual_clip=1.1, **ENGINE), lambda: clipped(flat(), against_engine=True, dual=1.1),
                      lambda: clipped(flat(), against_engine=True)),
    "kl": Case(Objective(epochs=2, kl_coef=0.5), lambda: clipped(flat(), 2, extra=kl(0.5)), lambda: clipped(flat(), 2)),
    "tis": Case(Objective(tis_cap=1.2), lambda: clipped(flat(), tis=1.2), lambda: clipped(flat(), tis=1.5)),
    "mean over weights": Case(Objective(mean_over="weights"), lambda: clipped(flat(), divisor=sum(s.weight for s in flat())),
                              lambda: clipped(flat())),
    "normalise": Case(Objective(normalise=True), lambda: clipped(flat(), advantages=normalised()), lambda: clipped(flat())),
    "regression": Case(Objective(loss="regression", epochs=2), lambda: regressed(2), lambda: regressed(1), samples=pairs),
    "regression with eta": Case(Objective(loss="regression", epochs=2, eta=2.0), lambda: regressed(2, eta=2.0), lambda: regressed(2), samples=pairs),
    "token critic": Case(Objective(mean_over="weights", epochs=2, critic=CRITIC), lambda: with_critic(CRITIC, 2, 2),
                         lambda: with_critic(replace(CRITIC, lam=0.5), 2, 2), updates=2),
    "turn critic": Case(Objective(mean_over="weights", critic=replace(CRITIC, level="turn", whiten=False, clip=0.0)),
                        lambda: with_critic(replace(CRITIC, level="turn", whiten=False, clip=0.0), 2, 1),
                        lambda: with_critic(replace(CRITIC, whiten=False, clip=0.0), 2, 1), updates=2),
    "continuation clamp": Case(Objective(continuation_clamp=(0.8, 1.3), **ENGINE),
                               lambda: clipped(continued(), against_engine=True, advantages=continuations(0.8, 1.3)),
                               lambda: clipped(continued(), against_engine=True, advantages=continuations(1.0, 1.0)), samples=continued),
    "reverse turns": Case(Objective(ratio="sequence", turns=TURNS), lambda: turn_by_turn(), lambda: turn_by_turn(carry=None)),
    "natural turns": Case(Objective(ratio="sequence", turns=replace(TURNS, order="natural")), lambda: turn_by_turn((0, 1, 2)),
                          lambda: turn_by_turn()),
    "geometric carry": Case(Objective(ratio="sequence", turns=replace(TURNS, carry="geometric")), lambda: turn_by_turn(carry="geometric"),
                            lambda: turn_by_turn()),
    "clipped carry": Case(Objective(ratio="sequence", turns=replace(TURNS, carry_clip=0.02)), lambda: turn_by_turn(carry_clip=0.02),
                          lambda: turn_by_turn()),
    "normalised and clamped turns": Case(Objective(ratio="sequence", normalise=True, epochs=2, turns=replace(TURNS, advantage_clip=1.0)),
                                         lambda: turn_by_turn(advantages=normalised(1.0), epochs=2),
                                         lambda: turn_by_turn(advantages=normalised(), epochs=2)),
}
DRAWN = {  # cases in which the seed decides among outcomes
    **{f"random turns {seed}": Case(Objective(ratio="sequence", turns=replace(TURNS, order="random")), None, seed=seed) for seed in range(3)},
    **{f"pairs in mini-batches {seed}": Case(Objective(loss="regression", minibatches=2), None, samples=pairs, seed=seed) for seed in range(3)},
    **{f"mini-batches {seed}": Case(Objective(minibatches=2, **CLIP), None, samples=three, seed=seed) for seed in range(3)},
    "more mini-batches than rollouts": Case(Objective(minibatches=7, clip_low=0.9, clip_high=9.0), None, samples=three),
    "turns in mini-batches": Case(Objective(ratio="sequence", epochs=2, minibatches=2, turns=TURNS), None),
    "many options": Case(Objective(ratio="sequence", epochs=2, minibatches=3, kl_coef=0.1, tis_cap=1.1, dual_clip=2.0), None),
}
LOCAL = ("engine", "asymmetric clip", "sequence ratio to the engine", "dual clip", "tis", "geometric carry", "clipped carry", "regression with eta")
EMPTY = {f"nothing for {name}": replace(CASES[name], samples=list) for name in (
    "one step", "kl", "regression", "token critic", "continuation clamp", "reverse turns", "normalised and clamped turns")}


# --- what runs on the ranks


def everything(learner):
    """Every parameter by its Hugging Face name, those of the value head included. One collective: FSDP2 shards the first axis."""
    shards = learner.gather({name: value.detach().to_local().double().numpy().copy() for name, value in learner.policy.named_parameters()})
    return {name.removeprefix("lm."): np.concatenate([shard[name] for shard in shards]) for name in shards[0]}


def build(model, objective, **config):
    return Learner(model, learner_config(**{"lr": RATE * 1e6, "beta1": 0.0, **config}), objective=objective, dtype="float32", temperature=TEMPERATURE,
                   device="cpu")


def share(samples, rank, world):
    """Whole groups: the first rank has the odd ones, the second the even ones, a third none."""
    return [s for s in samples if world == 1 or int(s.group_id[1]) % 2 != rank] if rank < 2 else []


def run_cases(rank, world, model, budget, cases):
    """By case: (result of the last update, what was subtracted from the parameters)."""
    found, learners = {}, {}
    for name, (objective, samples, updates, seed) in cases.items():
        kind = (objective.critic is not None, objective.kl_coef > 0)
        if kind not in learners:  # loading the model takes longer than a case
            learner = build(model, objective, micro_batch_tokens=budget)
            learners[kind] = learner, everything(learner), [value.detach().clone() for value in learner.policy.parameters()]
        learner, before, start = learners[kind]
        learner.objective = objective
        for number in range(updates):
            result = learner.update(share(samples, rank, world)[:: 1 if number % 2 else -1], N_GROUPS, N_ROLLOUTS, seed=seed)
        after = everything(learner)
        found[name] = (result, {key: before[key] - after[key] for key in before})
        with torch.no_grad():  # what AdamW remembers does not matter: beta1 is 0, and eps hides the second moment
            for value, origin in zip(learner.policy.parameters(), start, strict=True):
                value.copy_(origin)
    return found


def of_world(world):
    """Names of the cases: what a rank does alone needs no third one."""
    return [name for name in CASES if world < 3 or name not in LOCAL]


@functools.cache
def outcomes(world):
    """What every case came to on every rank."""
    chosen = {**{name: CASES[name] for name in of_world(world)}, **{1: DRAWN, 2: EMPTY, 3: DRAWN}[world]}
    cases = {name: (case.objective, case.samples(), case.updates, case.seed) for name, case in chosen.items()}
    return run_ranks(world, run_cases, tiny_model(layers=1), WORLDS[world], cases)


def gap(left, right):
    """Largest difference between two movements, over the largest movement."""
    assert left.keys() == right.keys()
    size = max(float(np.abs(value).max()) for value in right.values())
    return max(float(np.abs(left[name] - right[name]).max()) for name in left) / size


# --- tests


@pytest.mark.parametrize(("name", "world"), [(name, world) for world in WORLDS for name in of_world(world)])
def test_the_steps_are_gradient_descent_on_the_objective(name, world):
    expected = functools.cache(CASES[name].expected)()
    ranks = outcomes(world)
    for rank in ranks:
        assert gap(rank[name][1], expected) < 1e-4
    assert all(rank[name][0] == ranks[0][name][0] for rank in ranks)
    result, objective = ranks[0][name][0], CASES[name].objective
    assert result.refused == "" and result.optimizer_steps == objective.epochs * (3 if objective.turns else 1)
    assert result.tokens == sum(len(s.response_ids) for s in CASES[name].samples() if s.weight > 0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.otherwise])
def test_the_option_makes_a_difference_that_the_comparison_would_see(name):
    assert gap(CASES[name].otherwise(), CASES[name].expected()) > 0.05


def which(name, candidates):
    """The one of `candidates` (key -> movement) that the case came to, on every rank of both worlds."""
    found = [[key for key, expected in candidates.items() if gap(rank[name][1], expected) < 1e-4] for world in (1, 3) for rank in outcomes(world)]
    assert len(found[0]) == 1 and found == [found[0]] * len(found), found
    return found[0][0]


def test_random_turns_follow_the_seed_whatever_the_ranks():
    orders = {order: turn_by_turn(order) for order in itertools.permutations(range(3))}
    assert len({which(f"random turns {seed}", orders) for seed in range(3)}) > 1


def test_pairs_stay_together_in_mini_batches():
    """Of three pairs one step has two and the next one, each with twice the weight."""
    names = ("g0", "g1", "g2")
    candidates = {alone: regressed(0, parts=(tuple(name for name in names if name != alone), (alone,))) for alone in names}
    assert len({which(f"pairs in mini-batches {seed}", candidates) for seed in range(3)}) > 1


def test_responses_of_a_rollout_stay_together_in_mini_batches():
    names = ("g0/0", "g0/1", "g0/2")
    candidates = {alone: in_parts(([name for name in names if name != alone], [alone])) for alone in names}
    assert len({which(f"mini-batches {seed}", candidates) for seed in range(3)}) > 1


def test_more_mini_batches_than_rollouts_are_as_many_as_there_are():
    orders = itertools.permutations(("g0/0", "g0/1", "g0/2"))
    which("more mini-batches than rollouts", {order: in_parts([[name] for name in order]) for order in orders})
    assert outcomes(1)[0]["more mini-batches than rollouts"][0].optimizer_steps == 3


@pytest.mark.parametrize(("name", "steps"), [("turns in mini-batches", 12), ("many options", 6)])
def test_options_together_agree_on_any_number_of_ranks(name, steps):
    one = outcomes(1)[0][name]
    for result, moved in (rank[name] for rank in outcomes(3)):
        assert gap(moved, one[1]) < 1e-4 and result.optimizer_steps == steps and result.refused == ""
        assert result.loss == pytest.approx(one[0].loss, rel=1e-3) and result.clip_fraction == one[0].clip_fraction


@pytest.mark.parametrize("name", EMPTY)
def test_a_stage_without_samples_changes_nothing(name):
    for result, moved in (rank[name] for rank in outcomes(2)):
        assert (result.optimizer_steps, result.tokens, result.loss, result.refused) == (0, 0, 0.0, "")
        assert all((value == 0).all() for value in moved.values())


def test_with_a_critic_the_value_head_trains_and_without_one_there_is_none():
    for name in ("token critic", "turn critic"):
        moved = outcomes(1)[0][name][1]
        assert np.abs(moved["value_head.weight"]).max() > 0 and np.abs(moved["value_head.bias"]).max() > 0
    assert not [key for key in outcomes(1)[0]["one step"][1] if key.startswith("value_head")]


# --- pairs that are none, and what becomes of a value head


def refusals(rank, world, model, cases):
    """The error of each case, or its steps: the first rank has the first group, the second the rest."""
    learner, found = build(model, Objective(loss="regression")), []
    for samples in cases:
        try:
            found.append(learner.update([s for s in samples if (s.group_id == "g0") == (rank == 0)], N_GROUPS, N_ROLLOUTS, seed=0).optimizer_steps)
        except ValueError as error:
            found.append(str(error))
    return found


def save_with_critic(rank, world, model, samples, checkpoint, export, tokenizer):
    """A trained learner's parameters, names that are sent to generators, scores and the next update."""
    learner = build(model, Objective(mean_over="weights", critic=CRITIC), micro_batch_tokens=44)
    mine = share(samples, rank, world)
    learner.update(mine, N_GROUPS, N_ROLLOUTS, seed=0)
    learner.save_checkpoint(checkpoint)
    learner.export(export, tokenizer)
    saved, sent = everything(learner), [name for name, _ in learner.full_parameters()]
    assert [spec.name for spec in learner.parameters_manifest()] == sent
    learner.update(mine, N_GROUPS, N_ROLLOUTS, seed=1)
    return saved, sent, everything(learner)


def load_with_critic(rank, world, model, samples, checkpoint):
    learner = build(model, Objective(mean_over="weights", critic=CRITIC), micro_batch_tokens=44)
    learner.load_checkpoint(checkpoint)
    loaded = everything(learner)
    learner.update(share(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=1)
    return loaded, everything(learner)


def test_a_group_that_is_no_pair_is_refused_on_every_rank():
    lonely = [s for s in pairs() if s.rollout_id != "g1/1"]
    third = [*pairs(), replace(pairs()[-1], sample_id="g2/9:0", rollout_id="g2/9")]
    first, second = run_ranks(2, refusals, tiny_model(layers=1), [lonely, third, pairs()])
    assert second == [f"group {name} siblings with a response; the regression loss expects pairs" for name in ("g1 has 1", "g2 has 3")] + [1]
    assert first == [f"learner rank 1: {second[0]}", f"learner rank 1: {second[1]}", 1]


def equal_continuations(rank, world, model, samples):
    learner = build(model, Objective(continuation_clamp=(0.8, 0.8)))
    before = everything(learner)
    result = learner.update(share(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=0)
    return result.optimizer_steps, result.refused, all((value == before[name]).all() for name, value in everything(learner).items())


def test_continuations_that_are_worth_the_same_take_no_step():
    """Three siblings of 0.8 each, whose mean is not 0.8 to the last bit; only turn 1 is paid."""
    samples = [replace(s, reward=float(s.turn == 1)) for s in continued()]
    longer = {s.rollout_id for s in samples if s.turn == 1}
    samples = [replace(s, reward=s.reward if s.rollout_id in longer else 0.8) for s in samples]
    assert sum([0.8] * 3) / 3 != 0.8
    assert run_ranks(1, equal_continuations, tiny_model(layers=1), samples) == [(0, "", True)]


def test_a_checkpoint_holds_the_value_head_and_what_is_sent_or_exported_does_not():
    checkpoint, export = str(folder() / "critic"), str(folder() / "critic-export")
    saved, sent, after = run_ranks(2, save_with_critic, tiny_model(layers=1), flat(), checkpoint, export, tiny_tokenizer())[1]
    assert np.abs(saved["value_head.weight"]).max() > 0 and sorted(sent) == sorted(name for name in saved if not name.startswith("value_head"))
    for world in (1, 3):
        loaded, again = run_ranks(world, load_with_critic, tiny_model(layers=1), flat(), checkpoint)[world - 1]
        assert all((loaded[name] == saved[name]).all() for name in saved)
        assert max(float(np.abs(again[name] - after[name]).max()) for name in after) < 1e-6
    exported, info = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert all((value.detach().double().numpy() == saved[name]).all() for name, value in exported.named_parameters())
