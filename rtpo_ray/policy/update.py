"""One update of one stage, on one rank: what the objective makes of the samples, step by step. Collective.

    prepare   log-probabilities before the first step, and advantages that only the learner can know (values, stale continuations)
    parts     the samples in the order in which they are updated: all at once, or turn by turn
    steps     epochs x minibatches optimizer steps a part

Which samples share a step is decided by rollout id and seed; the number of ranks changes nothing. Samples of one rollout, and those of
one group, must lie on one rank: they come in one row of a group.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rtpo_ray.algorithms.base import TurnOrder
from rtpo_ray.objectives import carried_ratio, gae, regression_error, value_loss
from rtpo_ray.policy.batching import MicroBatch, assign_steps
from rtpo_ray.policy.step import Totals, add_gradient
from rtpo_ray.types import Sample, UpdateResult

if TYPE_CHECKING:
    from rtpo_ray.policy.learner import Learner


class Update:
    """Args:
    learner: the rank; gives micro-batches, log-probabilities, gathering and the optimizer.
    samples: this rank's, checked.
    n_groups, n_rollouts: of the whole stage over all ranks, those without any advantage included.
    """

    def __init__(self, learner: Learner, samples: Sequence[Sample], n_groups: int, n_rollouts: int, seed: int) -> None:
        self._learner, self._objective, self._device = learner, learner.objective, learner.device
        self._samples, self._seed = samples, seed
        self._trained = [sample for sample in samples if sample.weight > 0]
        self._totals = Totals(self._device)
        self._everywhere = [row for rows in learner.gather([(self._step_key(s), s.turn) for s in self._trained]) for row in rows]
        self._old: dict[str, Tensor] | None = None  # [T] by sample id: log pi_old; None: theta itself, since there is one step only
        self._values: dict[str, Tensor] = {}  # [T]
        self._advantages: dict[str, Tensor] = {}  # [T]; samples that are not here keep their own
        self._targets: dict[str, Tensor] = {}  # [T] of the value loss
        self._value_weights: dict[str, Tensor] = {}  # [T]
        weights = self._sum(sum(sample.weight for sample in self._trained))
        denominator = max(n_groups, 1) if self._objective.mean_over == "groups" else max(weights, 1e-12)
        self._denominator = denominator
        self._scale = 1.0 / denominator  # of the present part's losses: each of its steps sees a share of the samples
        with learner.raised_together():
            self._check()
        self._prepare(n_rollouts)

    def run(self) -> UpdateResult:
        """Take the steps. A step with a non-finite loss, log-probability or gradient is refused on all ranks and ends the update."""
        norms: list[float] = []
        refused = ""
        if self._nothing_to_learn():
            return self._totals.result(norms, 0, refused)
        parts = list(self._parts())
        for number, (turn, part) in enumerate(parts, 1):
            for step in self._steps(turn, part):
                norm, refused = self._step(step)
                norms.append(norm)
                if refused:
                    return self._totals.result(norms, len(norms) - 1, refused)
            if self._objective.turns is not None and number < len(parts):
                self._carry(part, self._objective.turns)
        return self._totals.result(norms, len(norms), refused)

    def _nothing_to_learn(self) -> bool:
        """Whether weighed continuations left every group with equal returns: a step would move the weights by momentum and decay alone."""
        if self._objective.continuation_clamp is None or self._objective.kl_coef or not self._everywhere:
            return False
        return self._sum(sum(bool(advantage.any()) for advantage in self._advantages.values())) == 0

    def _check(self) -> None:
        if self._objective.loss != "regression":
            return
        pairs: dict[str, set[str]] = {}
        for sample in self._trained:
            pairs.setdefault(sample.group_id, set()).add(sample.rollout_id)
        for name, siblings in pairs.items():
            if len(siblings) != 2:
                raise ValueError(f"group {name} has {len(siblings)} siblings with a response; the regression loss expects pairs")

    # --- before the first step

    def _prepare(self, n_rollouts: int) -> None:
        objective = self._objective
        one_step = objective.turns is None and min(objective.minibatches, len(self._step_names(self._everywhere))) * objective.epochs <= 1
        if not one_step or objective.critic is not None or objective.continuation_clamp is not None:
            self._old = self._score(self._samples, keep_values=True, gaps=True)
        if objective.continuation_clamp is not None:
            self._weigh_continuations(*objective.continuation_clamp)
        if objective.normalise:
            self._normalise(n_rollouts)
        if objective.critic is not None:
            self._estimate_advantages()

    @torch.no_grad()
    def _score(self, samples: Sequence[Sample], *, keep_values: bool = False, gaps: bool = False) -> dict[str, Tensor]:
        """log pi_theta of every sample [T]."""
        found: dict[str, Tensor] = {}
        for batch in self._learner.micro_batches(samples):
            logprobs, values = self._learner.forward(batch)
            if gaps:
                self._totals.add_gap(batch, logprobs)
            found.update(batch.split(logprobs))
            if keep_values and values is not None:
                self._values.update(batch.split(values))
        return found

    def _weigh_continuations(self, low: float, high: float) -> None:
        """A = Q - mean Q of the group with Q = r + clamp(prod rho, low, high) F, rho and F of what followed the trained turn."""
        assert self._old is not None
        own: dict[str, float] = {}
        later: dict[str, float] = {}
        change: dict[str, float] = {}
        for sample in self._samples:
            if sample.weight > 0:
                own[sample.rollout_id] = own.get(sample.rollout_id, 0.0) + sample.reward
            else:
                later[sample.rollout_id] = later.get(sample.rollout_id, 0.0) + sample.reward
                engine = torch.tensor(sample.engine_logprobs, dtype=torch.float64)
                moved = float((self._old[sample.sample_id].double().cpu() - engine).sum())
                change[sample.rollout_id] = change.get(sample.rollout_id, 0.0) + moved
        ratio = {name: min(max(float(torch.tensor(value).exp()), low), high) for name, value in change.items()}
        q = {name: reward + ratio.get(name, 1.0) * later.get(name, 0.0) for name, reward in own.items()}
        group = {sample.rollout_id: sample.group_id for sample in self._trained}
        members: dict[str, list[float]] = {}
        for name, value in q.items():
            members.setdefault(group[name], []).append(value)
        for sample in self._trained:
            peers = members[sample.group_id]
            advantage = q[sample.rollout_id] - sum(peers) / len(peers)
            self._set_advantage(sample, advantage if abs(advantage) > 1e-12 * max(1.0, *map(abs, peers)) else 0.0)  # 3 x 0.8 / 3 is not 0.8

    def _normalise(self, n_rollouts: int) -> None:
        """Divide by the standard deviation over the batch's rollouts. Their mean is 0 already: every group's is."""
        by_rollout = {sample.rollout_id: sample.advantage for sample in self._trained}
        variance = self._sum(sum(value**2 for value in by_rollout.values())) / max(n_rollouts, 1)
        for sample in self._trained:
            self._set_advantage(sample, sample.advantage / (variance**0.5 + 1e-6))

    def _estimate_advantages(self) -> None:
        """GAE over every rollout's tokens, or turns, and the targets of the value loss."""
        critic = self._objective.critic
        assert critic is not None
        rollouts: dict[str, list[Sample]] = {}
        for sample in self._trained:
            rollouts.setdefault(sample.rollout_id, []).append(sample)
        for samples in rollouts.values():
            samples.sort(key=lambda sample: (sample.turn, sample.sample_id))  # "7" before "7s", the summary of turn 7
            lengths = [len(sample.response_ids) for sample in samples]
            values = torch.cat([self._values[sample.sample_id] for sample in samples])
            rewards = torch.zeros_like(values)
            ends = torch.tensor(lengths).cumsum(0)
            starts = ends - torch.tensor(lengths)
            for sample, end in zip(samples, ends.tolist(), strict=True):
                rewards[end - 1] = sample.reward
            if critic.level == "token":
                advantages = gae(rewards, values, gamma=critic.gamma, lam=critic.lam)
                targets, weighed = advantages + values, torch.ones_like(values)
            else:
                steps = gae(rewards[ends - 1], values[starts], gamma=critic.gamma, lam=critic.lam)
                spread = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
                advantages, targets, weighed = steps[spread], (steps + values[starts])[spread], torch.zeros_like(values)
                weighed[starts] = torch.tensor(lengths, dtype=values.dtype, device=values.device)
            for sample, a, target, weight in zip(samples, advantages.split(lengths), targets.split(lengths), weighed.split(lengths), strict=True):
                self._advantages[sample.sample_id], self._targets[sample.sample_id] = a, target
                self._value_weights[sample.sample_id] = weight
        if critic.whiten:
            self._whiten()

    def _whiten(self) -> None:
        """Mean 0 and standard deviation 1 over the batch's tokens."""
        flat = torch.cat([*self._advantages.values(), torch.zeros(0, device=self._device)]).double()
        count, total, squares = self._sum(float(len(flat))), self._sum(float(flat.sum())), self._sum(float((flat**2).sum()))
        mean = total / max(count, 1.0)
        std = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
        self._advantages = {name: (value - mean) / (std + 1e-8) for name, value in self._advantages.items()}

    # --- the order of things

    def _parts(self) -> Iterator[tuple[int | None, list[Sample]]]:
        """Turn (None: all) and samples of what is updated together, in order; the same turns on every rank."""
        turns = self._objective.turns
        if turns is None:
            yield None, self._trained
            return
        order = sorted({turn for _, turn in self._everywhere}, reverse=turns.order == "reverse")
        if turns.order == "random":
            random.Random(f"{self._seed}/turns").shuffle(order)
        for sample in self._trained:
            value = float(self._advantages[sample.sample_id][0]) if sample.sample_id in self._advantages else sample.advantage
            self._set_advantage(sample, max(-turns.advantage_clip, min(turns.advantage_clip, value)) if turns.advantage_clip else value)
        for turn in order:
            yield turn, [sample for sample in self._trained if sample.turn == turn]

    def _carry(self, part: Sequence[Sample], turns: TurnOrder) -> None:
        """M_t = [pi_new(l_t) / pi_old(l_t)] M_{t+1}, for all responses of the rollouts in `part`."""
        assert self._old is not None
        new, change = self._score(part), dict[str, list[Tensor]]()
        for sample in part:
            change.setdefault(sample.rollout_id, []).append(new[sample.sample_id] - self._old[sample.sample_id])
        ratio = {name: carried_ratio(torch.cat(changes), mode=turns.carry, clip=turns.carry_clip) for name, changes in change.items()}
        for sample in self._trained:
            if sample.rollout_id in ratio:
                self._advantages[sample.sample_id] = self._advantages[sample.sample_id] * ratio[sample.rollout_id]

    def _steps(self, turn: int | None, part: Sequence[Sample]) -> Iterator[list[Sample]]:
        """This rank's samples of every optimizer step; steps without a sample on any rank are left out."""
        names = self._step_names([row for row in self._everywhere if turn in (None, row[1])])
        count = min(self._objective.minibatches, len(names))
        self._scale = count / self._denominator
        for epoch in range(self._objective.epochs):
            step_of = assign_steps(names, max(count, 1), random.Random(f"{self._seed}/{epoch}").getrandbits(32))
            for step in range(count):
                yield [sample for sample in part if step_of[self._step_key(sample)] == step]

    def _step_key(self, sample: Sample) -> str:
        """What may not be torn apart: the pair of a regression, otherwise the rollout, whose responses share a sequence."""
        return sample.group_id if self._objective.loss == "regression" else sample.rollout_id or sample.sample_id

    @staticmethod
    def _step_names(rows: Sequence[tuple[str, int]]) -> list[str]:
        return sorted({name for name, _ in rows})

    # --- one step

    def _step(self, samples: Sequence[Sample]) -> tuple[float, str]:
        """One optimizer step, or none: (gradient norm, why it was refused or "")."""
        if self._objective.loss == "regression":
            self._regress(samples)
        unusable: list[str] = []
        for batch in self._learner.micro_batches(samples):
            old = None if self._old is None else self._of(batch, self._old, batch.engine_logprobs)
            value_loss = functools.partial(self._value_loss, batch) if self._objective.critic is not None else None
            unusable += add_gradient(self._learner, batch, self._totals, self._scale, old=old,
                                     advantages=self._of(batch, self._advantages, batch.advantages), value_loss=value_loss)
        return self._learner.optimizer_step(unusable)

    def _value_loss(self, batch: MicroBatch, values: Tensor | None) -> Tensor:
        critic = self._objective.critic
        assert critic is not None and values is not None, "the objective has a critic, so the policy has a value head"
        zeros = torch.zeros_like(batch.weights)
        weights = batch.weights * self._of(batch, self._value_weights, zeros)
        return critic.coef * value_loss(values, self._of(batch, self._values, zeros), self._of(batch, self._targets, zeros), weights, critic.clip)

    def _regress(self, samples: Sequence[Sample]) -> None:
        """Advantages with which -A log pi has the gradient of the squared error e^2: d e^2 = 2 e / eta (d log pi(l) - d log pi(l'))."""
        moved = {} if self._old is None else self._score(samples)
        pairs: dict[str, dict[str, list[Sample]]] = {}
        for sample in samples:
            pairs.setdefault(sample.group_id, {}).setdefault(sample.rollout_id, []).append(sample)
        for pair in pairs.values():
            changes = [0.0 if self._old is None else sum(float((moved[s.sample_id] - self._old[s.sample_id]).sum()) for s in side)
                       for side in pair.values()]
            targets = [side[0].advantage for side in pair.values()]
            error = regression_error((changes[0], changes[1]), (targets[0], targets[1]), self._objective.eta)
            for side, sign in zip(pair.values(), (1.0, -1.0), strict=True):
                for sample in side:  # every token weighs weight / T in the sum, and 1 in the squared error
                    self._set_advantage(sample, -sign * 2 * error / self._objective.eta * len(sample.response_ids) / sample.weight)

    # --- small things

    def _set_advantage(self, sample: Sample, value: float) -> None:
        self._advantages[sample.sample_id] = torch.full((len(sample.response_ids),), value, dtype=torch.float32, device=self._device)

    def _of(self, batch: MicroBatch, values: dict[str, Tensor], otherwise: Tensor) -> Tensor:
        """Kept values of the batch's tokens [M]; `otherwise` for a dummy and when nothing is kept."""
        if not batch.sample_ids or not values:
            return otherwise
        return torch.cat([values[name] for name in batch.sample_ids])

    def _sum(self, value: float) -> float:
        """Over all ranks."""
        total = torch.tensor(float(value), dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return float(total)
