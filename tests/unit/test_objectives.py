"""The clipped surrogate against numbers worked out by hand."""

import math

import pytest
import torch

from rtpo_ray.objectives import clipped_surrogate, k3

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def surrogate(ratios, advantages, weights, **clip):
    logprobs = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    loss, metrics = clipped_surrogate(logprobs, torch.zeros(len(ratios)), torch.tensor(advantages), torch.tensor(weights), **(clip or CLIP))
    loss.backward()
    return loss.item(), metrics, logprobs.grad.tolist()


@pytest.mark.parametrize(("ratio", "advantage", "objective", "gradient"), [
    (1.5, 1.0, 1.2, 0.0),  # too high and good: held at 1.2
    (0.5, 1.0, 0.5, -0.5),  # too low and good: free to rise
    (1.5, -1.0, -1.5, 1.5),  # too high and bad: free to fall
    (0.5, -1.0, -0.8, 0.0),  # too low and bad: held at 0.8
    (1.1, 2.0, 2.2, -2.2),  # inside: the plain ratio
    (1.0, 0.0, 0.0, 0.0),
])
def test_one_token(ratio, advantage, objective, gradient):
    loss, metrics, grad = surrogate([ratio], [advantage], [1.0])
    assert loss == pytest.approx(-objective)
    assert grad == pytest.approx([gradient])
    assert metrics["clipped_tokens"].item() == float(gradient == 0.0 and advantage != 0.0)


def test_clip_is_per_token():
    """rho = (1.5, .5): each token has its own clip. A clip of the product .75 would be .8, the product of clips .96."""
    loss, _, _ = surrogate([1.5, 0.5], [1.0, 1.0], [0.5, 0.5])
    assert loss == pytest.approx(-(1.2 + 0.5) / 2)
    loss, metrics, _ = surrogate([1.1] * 10, [1.0] * 10, [0.1] * 10)
    assert loss == pytest.approx(-1.1)  # the product 2.5937 would have been clipped to 1.2
    assert metrics["clipped_tokens"].item() == 0


def test_rtpo_objective_of_ragged_groups():
    """J = mean over 2 groups of 1/n sum_j 1/T_j sum_t min(...). Group 1: n = 2, T = (1, 2); group 2: n = 1, T = 1."""
    ratios, advantages = [1.5, 1.1, 0.5, 0.9], [0.5, -0.5, -0.5, 2.0]
    weights = [1 / (2 * 2 * 1), 1 / (2 * 2 * 2), 1 / (2 * 2 * 2), 1 / (2 * 1 * 1)]
    by_hand = 0.5 * (0.5 * (1.2 * 0.5 / 1 + (1.1 * -0.5 + 0.8 * -0.5) / 2) + 0.9 * 2.0)
    loss, metrics, _ = surrogate(ratios, advantages, weights)
    assert by_hand == pytest.approx(0.93125)
    assert loss == pytest.approx(-by_hand)
    assert metrics["tokens"].item() == 4
    assert metrics["clipped_tokens"].item() == 2
    assert metrics["clipped_weight"].item() == pytest.approx(0.25 + 0.125)


def test_asymmetric_clip():
    assert surrogate([1.5], [1.0], [1.0], clip_low=0.1, clip_high=0.28)[0] == pytest.approx(-1.28)
    assert surrogate([0.5], [-1.0], [1.0], clip_low=0.1, clip_high=0.28)[0] == pytest.approx(0.9)


def test_on_policy_gradient_is_weighted_policy_gradient():
    """With rho = 1 the gradient of the loss is -weight * A, the plain policy gradient."""
    assert surrogate([1.0, 1.0], [3.0, -2.0], [0.25, 0.5])[2] == pytest.approx([-0.75, 1.0])


def test_gradient_only_through_current_logprobs():
    old = torch.zeros(1, requires_grad=True)
    loss, _ = clipped_surrogate(torch.zeros(1, requires_grad=True), old, torch.ones(1), torch.ones(1), **CLIP)
    loss.backward()
    assert old.grad is None


def test_nan_is_not_hidden_by_the_clip():
    assert math.isnan(surrogate([1.0], [math.nan], [1.0])[0])


def test_k3():
    found = k3(torch.tensor([0.0, 0.2, -0.1, 50.0]))
    assert found.tolist() == pytest.approx([0.0, math.exp(0.2) - 1.2, math.exp(-0.1) - 0.9, math.exp(10) - 11], rel=1e-4)
