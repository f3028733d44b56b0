"""Objectives: tensors in, tensors and metrics out. No model, no configuration, no communication.

RTPO's objective of turn k (arXiv 2608.18682) is

    J_k = mean over groups of 1/n sum_j 1/T_j sum_t min(rho A, clip(rho, 1 - eps, 1 + eps) A)

with rho the token's own ratio pi_theta / pi_theta_old. The three means are linear, so they live in one number a token: the
caller gives every token the weight 1 / (groups * n * T_j) and gets a sum. A sum does not change when the tokens are split over
micro-batches or ranks; a mean would.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_token_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Unweighted loss of every token and whether the clip holds it, both [N].

    All inputs are [N]. "Holds" means that the clipped branch is the smaller one, so the token sends no gradient.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over tokens of weight * -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A): a scalar to minimise.

    All inputs are [N]; only `logprobs` receives a gradient. The metrics are detached scalars that are summed over micro-batches:
    `tokens`, `clipped_tokens`, `clipped_weight`.
    """
    losses, held = clipped_token_losses(logprobs, old_logprobs.detach(), advantages, clip_low=clip_low, clip_high=clip_high)
    metrics = {
        "tokens": torch.tensor(float(losses.numel()), device=losses.device),
        "clipped_tokens": held.sum().float(),
        "clipped_weight": (weights * held).sum().detach(),
    }
    return (weights * losses).sum(), metrics


def k3(log_ratio: Tensor) -> Tensor:
    """Per-token estimate e^d - d - 1 of KL(p || q) for d = log q - log p on tokens sampled from p; never negative. [N] -> [N].

    d is clamped to +/-10, so that one absurd token does not hide the rest.
    """
    clamped = log_ratio.clamp(-10.0, 10.0)
    return torch.exp(clamped) - clamped - 1.0
