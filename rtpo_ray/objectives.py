"""Objectives: tensors in, tensors and metrics out. No model, no configuration, no communication.

A method's objective is a mean over groups of a mean over rollouts of a mean over tokens (RTPO, arXiv 2608.18682:
1/n sum_j 1/T_j sum_t min(rho A, clip(rho, 1 - eps, 1 + eps) A)). The means are linear, so they live in one weight a token and the
loss is a sum. A sum does not change when the tokens are split over micro-batches or ranks; a mean would.

Axes: M tokens of a micro-batch, T tokens of a response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtpo_ray.algorithms.base import Objective


def token_ratios(logprobs: Tensor, old_logprobs: Tensor, sequences: Tensor, *, level: str) -> Tensor:
    """pi_theta / pi_old [M]: of the token, or ("sequence") the geometric mean over its response, exp(mean_t dlogp) (GSPO, arXiv 2507.18071).

    `sequences` [M] int64: the response of each token. The sequence ratio's gradient is sg[s] * pi / sg[pi], each token its own share.
    """
    change = logprobs - old_logprobs
    if level == "token":
        return torch.exp(change)
    return torch.exp(_means(change.detach(), sequences)) * torch.exp(logprobs - logprobs.detach())


def _means(values: Tensor, sequences: Tensor) -> Tensor:
    """Mean of `values` over each token's response, at every token: [M] -> [M]."""
    count = int(sequences.max()) + 1
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequences, values)
    return (sums / torch.bincount(sequences, minlength=count))[sequences]


def token_losses(ratios: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), for A < 0 and a dual clip at most -dual_clip * A, and whether a clip holds
    the token, which then sends no gradient: [M] each."""
    plain = ratios * advantages
    clipped = ratios.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high) * advantages
    gains, held = torch.minimum(plain, clipped), clipped < plain
    if objective.dual_clip:
        floor = objective.dual_clip * advantages
        beyond = (advantages < 0) & (gains < floor)
        gains, held = torch.where(beyond, floor, gains), held | beyond
    return -gains, held


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, sequences: Tensor, objective: Objective,
    engine_logprobs: Tensor | None = None, reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over tokens of weight * loss, a scalar to minimise, with the KL term when there is a reference.

    All inputs are [M]; only `logprobs` receives a gradient. `engine_logprobs` is needed for truncated importance sampling. The metrics are
    detached scalars that are summed over micro-batches: `tokens`, `clipped_tokens`.
    """
    old = old_logprobs.detach()
    if objective.loss == "regression":  # the learner made the advantages such that this has the squared error's gradient
        losses, held = -logprobs * advantages, torch.zeros_like(advantages, dtype=torch.bool)
    else:
        losses, held = token_losses(token_ratios(logprobs, old, sequences, level=objective.ratio), advantages, objective)
    if objective.tis_cap:
        assert engine_logprobs is not None, "truncated importance sampling needs the engine's log-probabilities"
        losses = losses * truncated_weights(old, engine_logprobs, objective.tis_cap)
    if reference_logprobs is not None:
        losses = losses + objective.kl_coef * k3(reference_logprobs - logprobs)
    metrics = {"tokens": torch.tensor(float(losses.numel()), device=losses.device), "clipped_tokens": held.sum().float()}
    return (weights * losses).sum(), metrics


def truncated_weights(old_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_learner_old / pi_engine, cap), detached: [M] -> [M]."""
    return torch.exp(old_logprobs - engine_logprobs).clamp(max=cap).detach()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, weights: Tensor, clip: float) -> Tensor:
    """Sum of weight * 1/2 max((V - R)^2, (clip(V, V_old +/- clip) - R)^2) over tokens [M]; clip 0: the first term alone."""
    errors = (values - targets) ** 2
    if clip:
        moved = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (moved - targets) ** 2)
    return 0.5 * (weights * errors).sum()


def gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Advantages [S] of the steps of one episode that ends with the last (arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after the end, and A_t = delta_t + gamma lam A_{t+1}.
    """
    advantages = torch.zeros_like(values)
    following, advantage = values.new_zeros(()), values.new_zeros(())
    for step in reversed(range(len(values))):
        advantage = rewards[step] + gamma * following - values[step] + gamma * lam * advantage
        advantages[step], following = advantage, values[step]
    return advantages


def k3(log_ratio: Tensor) -> Tensor:
    """Per-token estimate e^d - d - 1 of KL(p || q) for d = log q - log p on tokens sampled from p; never negative. [M] -> [M].

    d is clamped to +/-10, so that one absurd token does not hide the rest.
    """
    clamped = log_ratio.clamp(-10.0, 10.0)
    return torch.expm1(clamped) - clamped  # exp(d) - 1 would cancel for the small d of two equal models


def carried_ratio(changes: Tensor, *, mode: str, clip: float) -> Tensor:
    """pi_new / pi_old of a response from its tokens' log-ratios [T]: "product" of the token ratios, or their "geometric" mean; clipped to
    1 +/- clip unless that is 0 (SeeUPO, arXiv 2602.06554)."""
    ratio = torch.exp(changes.sum() if mode == "product" else changes.mean())
    return ratio.clamp(1.0 - clip, 1.0 + clip) if clip else ratio


def regression_error(changes: tuple[float, float], targets: tuple[float, float], eta: float) -> float:
    """(1 / eta) [log ratio(l) - log ratio(l')] - (R - R') of a pair (REFUEL, arXiv 2410.04612)."""
    return (changes[0] - changes[1]) / eta - (targets[0] - targets[1])
