"""One micro-batch of an optimizer step: its loss, its gradient and what is counted of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rtpo_ray.objectives import k3, policy_loss
from rtpo_ray.policy.batching import MicroBatch
from rtpo_ray.types import UpdateResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from rtpo_ray.policy.learner import Learner

_SUMS = ("tokens", "gap", "absolute_gap", "k3", "loss", "clipped_tokens", "ratio_tokens", "positions", "unique")


def add_gradient(
    learner: Learner, batch: MicroBatch, totals: Totals, scale: float, *, old: Tensor | None = None, advantages: Tensor | None = None,
    value_loss: Callable[[Tensor | None], Tensor] | None = None,
) -> list[str]:
    """Add the gradient of `scale` times the batch's loss. Returns the samples with a value that is not finite.

    `old`: log pi_old [M], None for theta itself; `advantages` [M]: None for the batch's own; `value_loss`: of the values.
    """
    objective = learner.objective
    reference = learner.reference_logprobs(batch)  # first: nothing of a pass under way is kept meanwhile
    logprobs, values = learner.forward(batch)
    if old is None:
        totals.add_gap(batch, logprobs.detach())
    before = batch.engine_logprobs if objective.old_policy == "engine" else logprobs.detach() if old is None else old
    advantages = batch.advantages if advantages is None else advantages
    loss, metrics = policy_loss(logprobs, before, advantages, batch.weights, batch.sample_index, objective, batch.engine_logprobs, reference)
    if value_loss is not None:
        loss = loss + value_loss(values)
    # FSDP2 averages gradients over ranks; the objective is a sum over them.
    (loss * (scale * learner.world_size)).backward()
    totals.add_step(batch, loss.detach() * scale, metrics)
    checked = logprobs.detach() + before.detach() + advantages * batch.weights + batch.engine_logprobs
    bad = ~torch.isfinite(checked)
    return [batch.sample_ids[index] for index in batch.sample_index[bad].unique().tolist()] if batch.sample_ids else []


class Totals:
    """Sums and maxima of one update, on the device until the end. Dummies do not count."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in _SUMS}
        self._worst = torch.zeros((), dtype=torch.float64, device=device)

    def add_gap(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Once for every trained sample, with log-probabilities [M] from before the first optimizer step."""
        trained = batch.weights > 0
        if not batch.sample_ids or not bool(trained.any()):
            return
        gap = (logprobs.double() - batch.engine_logprobs.double())[trained]
        self._add(tokens=torch.ones_like(gap), gap=gap, absolute_gap=gap.abs(), k3=k3(gap))
        self._worst = torch.maximum(self._worst, gap.abs().max().double())

    def add_step(self, batch: MicroBatch, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Once for every use of a sample. `loss`: scalar, the batch's share of the step's loss."""
        if not batch.sample_ids:
            return
        positions = torch.tensor(float(batch.input_ids.numel()), device=loss.device)
        unique = torch.full_like(positions, float(batch.unique_tokens))
        self._add(loss=loss, clipped_tokens=metrics["clipped_tokens"], ratio_tokens=metrics["tokens"], positions=positions, unique=unique)

    def result(self, grad_norms: Sequence[float], taken: int, refused: str, loss_scale: float = 1.0) -> UpdateResult:
        """Sum over the ranks (collective)."""
        stacked = torch.stack(list(self._sums.values()))
        dist.all_reduce(stacked)
        dist.all_reduce(self._worst, op=dist.ReduceOp.MAX)
        total = dict(zip(self._sums, stacked.tolist(), strict=True))
        tokens, steps = max(total["tokens"], 1.0), max(len(grad_norms), 1)
        return UpdateResult(
            loss=total["loss"] * loss_scale / steps, grad_norm=sum(grad_norms) / steps, logprob_gap_mean=total["absolute_gap"] / tokens,
            logprob_gap_max=float(self._worst), ratio_geomean=float(torch.tensor(total["gap"] / tokens, dtype=torch.float64).exp()),
            k3=total["k3"] / tokens, clip_fraction=total["clipped_tokens"] / max(total["ratio_tokens"], 1.0), tokens=int(total["tokens"]),
            learner_tokens=int(total["positions"]), unique_tokens=int(total["unique"]), optimizer_steps=taken, refused=refused)

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] += value.double().sum()
