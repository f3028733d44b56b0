"""Objectives against numbers worked out by hand."""

import math

import pytest
import torch

from rtpo_ray.algorithms.base import Objective
from rtpo_ray.objectives import carried_ratio, gae, k3, policy_loss, regression_error, token_ratios, truncated_weights, value_loss


def surrogate(ratios, advantages, weights, *, sequences=None, engine=None, reference=None, **options):
    """(loss, metrics, gradient) of tokens with these ratios; each is a response of its own unless `sequences` says otherwise."""
    logprobs = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    index = torch.arange(len(ratios)) if sequences is None else torch.tensor(sequences)
    loss, metrics = policy_loss(logprobs, torch.zeros(len(ratios)), torch.tensor(advantages), torch.tensor(weights), index, Objective(**options),
                                None if engine is None else torch.tensor(engine), None if reference is None else torch.tensor(reference))
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


def test_asymmetric_clip():
    assert surrogate([1.5], [1.0], [1.0], clip_low=0.1, clip_high=0.28)[0] == pytest.approx(-1.28)
    assert surrogate([0.5], [-1.0], [1.0], clip_low=0.1, clip_high=0.28)[0] == pytest.approx(0.9)


def test_on_policy_gradient_is_weighted_policy_gradient():
    """With rho = 1 the gradient of the loss is -weight * A, the plain policy gradient."""
    assert surrogate([1.0, 1.0], [3.0, -2.0], [0.25, 0.5])[2] == pytest.approx([-0.75, 1.0])


def test_gradient_only_through_current_logprobs():
    old = torch.zeros(1, requires_grad=True)
    engine, reference = (torch.ones(1, requires_grad=True) for _ in range(2))
    now = torch.zeros(1, requires_grad=True)
    loss, _ = policy_loss(now, old, torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), Objective(tis_cap=2.0, kl_coef=0.5), engine,
                          reference.detach())
    loss.backward()
    assert old.grad is None and engine.grad is None and now.grad is not None


def test_nan_is_not_hidden_by_the_clip():
    assert math.isnan(surrogate([1.0], [math.nan], [1.0])[0])


def test_k3():
    found = k3(torch.tensor([0.0, 0.2, -0.1, 50.0, -50.0]))
    assert found.tolist() == pytest.approx([0.0, math.exp(0.2) - 1.2, math.exp(-0.1) - 0.9, math.exp(10) - 11, math.exp(-10) + 9], rel=1e-4)


def test_sequence_ratio_is_the_geometric_mean_of_the_response():
    """GSPO: dlogp (.2, -.1) gives exp(.05) = 1.05127 (the product is 1.10517); another response has its own."""
    ratios = token_ratios(torch.tensor([0.2, -0.1, 0.3]), torch.zeros(3), torch.tensor([0, 0, 1]), level="sequence")
    assert ratios.tolist() == pytest.approx([1.05127, 1.05127, math.exp(0.3)], rel=1e-5)
    tokens = token_ratios(torch.tensor([0.2, -0.1, 0.3]), torch.zeros(3), torch.tensor([0, 0, 1]), level="token")
    assert tokens.tolist() == pytest.approx([math.exp(0.2), math.exp(-0.1), math.exp(0.3)])


def test_sequence_ratio_gradient_is_s_times_each_tokens_own():
    """d(-w A sg[s] pi / sg[pi]) / d log pi = -w A s at every token; with weights 1 / T this is the gradient of -A s itself."""
    s = math.exp(0.05)
    loss, metrics, grad = surrogate([math.exp(0.2), math.exp(-0.1)], [2.0, 2.0], [0.5, 0.5], sequences=[0, 0], ratio="sequence")
    assert loss == pytest.approx(-2.0 * s) and grad == pytest.approx([-s, -s]) and metrics["clipped_tokens"].item() == 0
    logprobs = torch.tensor([0.2, -0.1], requires_grad=True)
    (-2.0 * torch.exp(logprobs.mean())).backward()
    assert grad == pytest.approx(logprobs.grad.tolist())


def test_sequence_ratio_is_clipped_as_one():
    """s = 1.5 of the tokens (2.25, 1): both tokens are held, though the second token's own ratio is inside."""
    loss, metrics, grad = surrogate([2.25, 1.0], [1.0, 1.0], [0.5, 0.5], sequences=[0, 0], ratio="sequence")
    assert loss == pytest.approx(-1.2) and grad == [0.0, 0.0] and metrics["clipped_tokens"].item() == 2
    loss, _, grad = surrogate([2.25, 1.0], [1.0, 1.0], [0.5, 0.5])
    assert loss == pytest.approx(-(1.2 + 1.0) / 2) and grad == pytest.approx([0.0, -0.5])


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), [
    (5.0, -1.0, 3.0, 0.0),  # bad and far too likely: the loss stops at 3 |A|, and its gradient
    (2.0, -1.0, 2.0, 2.0),  # bad and too likely, but below the dual clip
    (5.0, 1.0, -1.2, 0.0),  # good: the ordinary clip
    (0.5, -1.0, 0.8, 0.0),
])
def test_dual_clip(ratio, advantage, loss, gradient):
    found, metrics, grad = surrogate([ratio], [advantage], [1.0], dual_clip=3.0)
    assert found == pytest.approx(loss) and grad == pytest.approx([gradient])
    assert metrics["clipped_tokens"].item() == float(gradient == 0)
    assert surrogate([5.0], [-1.0], [1.0])[0] == pytest.approx(5.0)


def test_truncated_importance_sampling_weighs_tokens_and_caps():
    """min(pi_old / pi_engine, 2): log gaps .5 and 3 weigh e^.5 and 2; no gradient through the weight."""
    assert truncated_weights(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -4.0]), 2.0).tolist() == pytest.approx([math.exp(0.5), 2.0])
    loss, _, grad = surrogate([1.0, 1.0], [1.0, 1.0], [0.5, 0.5], engine=[-0.5, -3.0], tis_cap=2.0)
    assert loss == pytest.approx(-(math.exp(0.5) + 2.0) / 2) and grad == pytest.approx([-math.exp(0.5) / 2, -1.0])
    with pytest.raises(AssertionError, match="needs the engine's"):
        surrogate([1.0], [1.0], [1.0], tis_cap=2.0)


def test_kl_to_the_reference():
    """k3 of d = ref - log pi, weighed like the loss: d/dlog pi = coef w (1 - e^d)."""
    loss, _, grad = surrogate([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], reference=[0.2, 0.0], kl_coef=0.1)
    assert loss == pytest.approx(0.05 * (math.exp(0.2) - 1.2), rel=1e-4)
    assert grad == pytest.approx([0.05 * (1 - math.exp(0.2)), 0.0])
    assert surrogate([1.0], [3.0], [1.0], reference=[0.0], kl_coef=0.1)[0] == pytest.approx(-3.0)  # added to the policy's loss


def test_regression_loss_is_linear_in_the_log_probability():
    loss, metrics, grad = surrogate([5.0, 0.1], [2.0, -3.0], [0.5, 0.25], loss="regression")
    assert loss == pytest.approx(-(0.5 * 2.0 * math.log(5) + 0.25 * -3.0 * math.log(0.1)))
    assert grad == pytest.approx([-1.0, 0.75]) and metrics["clipped_tokens"].item() == 0


def test_regression_error():
    """(1 / .5) (.3 - -.1) - (1 - .25) = .8 - .75."""
    assert regression_error((0.3, -0.1), (1.0, 0.25), 0.5) == pytest.approx(0.05)
    assert regression_error((0.0, 0.0), (1.0, 0.0), 2.0) == -1.0


def test_value_loss_with_and_without_clip():
    """V = (1, 1), V_old = (0, 1), R = (2, 0): the clip holds the first at .2, so its error is 1.8^2."""
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    old, targets, weights = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 0.0]), torch.tensor([0.5, 1.0])
    plain = value_loss(values, old, targets, weights, clip=0.0)
    assert plain.item() == pytest.approx(0.5 * (0.5 * 1.0 + 1.0 * 1.0))
    clipped = value_loss(values, old, targets, weights, clip=0.2)
    assert clipped.item() == pytest.approx(0.5 * (0.5 * 1.8**2 + 1.0))
    clipped.backward()
    assert values.grad.tolist() == pytest.approx([0.0, 1.0])  # the held value sends no gradient


@pytest.mark.parametrize(("gamma", "lam", "expected"), [
    (1.0, 1.0, [0.5, 0.4, 0.2]), (1.0, 0.95, [0.4705, 0.39, 0.2]), (1.0, 0.0, [0.1, 0.2, 0.2]), (0.5, 1.0, [0.25 - 0.5, 0.5 - 0.6, 0.2])])
def test_gae_by_hand(gamma, lam, expected):
    """r = (0, 0, 1), V = (.5, .6, .8)."""
    found = gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.6, 0.8]), gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_carried_ratio():
    """Token ratios (1.5, .5): product .75; geometric mean .8660; the clip bounds the result and not the tokens."""
    changes = torch.log(torch.tensor([1.5, 0.5]))
    assert carried_ratio(changes, mode="product", clip=0.0).item() == pytest.approx(0.75)
    assert carried_ratio(changes, mode="product", clip=0.2).item() == pytest.approx(0.8)
    assert carried_ratio(changes, mode="geometric", clip=0.0).item() == pytest.approx(math.sqrt(0.75))
    assert carried_ratio(torch.log(torch.tensor([1.1] * 10)), mode="product", clip=0.0).item() == pytest.approx(2.5937, rel=1e-4)
    assert carried_ratio(torch.log(torch.tensor([1.1] * 10)), mode="product", clip=0.2).item() == pytest.approx(1.2)
