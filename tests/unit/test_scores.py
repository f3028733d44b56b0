"""pass@k and intervals against numbers worked by hand and by counting."""

import itertools
import math
from collections import Counter

import pytest

from pipelines.counts import EpisodeCounts
from rtpo_ray.reports.scores import interval, pass_at, summarise


@pytest.mark.parametrize(("n", "c", "k"), [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at({(n, c): 3}, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_a_mean_over_tasks_and_takes_what_there_is():
    assert pass_at({(4, 1): 1, (4, 4): 1, (4, 0): 2}, 2) == pytest.approx((0.5 + 1 + 0 + 0) / 4)
    assert pass_at({(1, 1): 1, (1, 0): 1}, 8) == 0.5  # the other episodes failed
    assert pass_at({}, 2) is None


def test_intervals_by_hand():
    """Wilson's interval of 50 in 100 and of none in 10, as in Newcombe 1998 for the level of 95 %."""
    assert interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = interval(0.0, 10)
    assert (low, high) == (0.0, pytest.approx(0.27753, abs=1e-5))
    assert interval(1.0, 10) == pytest.approx((1 - 0.27753, 1.0), abs=1e-5)
    assert interval(None, 0) == interval(0.5, 0) == (None, None)


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    """Exactly, by summing the binomial distribution: the mean coverage over many truths is that of the level."""
    n, truths = 60, [i / 40 for i in range(2, 39)]
    weights = {p: [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)] for p in truths}
    inside = [sum(weight for c, weight in enumerate(weights[p]) if interval(c / n, n)[0] <= p <= interval(c / n, n)[1]) for p in truths]
    assert 0.94 < sum(inside) / len(inside) < 0.96


def test_a_summary_leaves_failed_episodes_out_of_the_shares():
    counts = EpisodeCounts(episodes=10, successes=3, returns=3.5, turns=20, tool_calls=15, malformed_calls=2, failed_calls=1, cut=4,
                           generated_tokens=600, tasks=Counter({(2, 2): 1, (2, 1): 1, (2, 0): 2}), failed=Counter({"E: x": 2}))
    found = summarise(counts, 2)
    assert found == {
        "success": 3 / 8, "success_low": pytest.approx(0.0917, abs=1e-3), "success_high": pytest.approx(0.7811, abs=1e-3), "samples": 2,
        "return_mean": 3.5 / 8, "turns_mean": 20 / 8, "tool_calls_mean": 15 / 8, "executed_calls": 13, "failed_calls": 1, "malformed_calls": 2,
        "truncation_rate": 0.5, "tokens_per_success": 200.0, "pass_at_k": 0.5, "pass_at_k_low": pytest.approx(0.15, abs=1e-3),
        "pass_at_k_high": pytest.approx(0.85, abs=1e-3)}
    assert "pass_at_k" not in summarise(counts, 1)
    assert summarise(EpisodeCounts(), 1)["success"] is None
