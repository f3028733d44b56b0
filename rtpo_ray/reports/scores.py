"""What an evaluation is summed up to: pass@k and the like, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

Z = 1.959964  # of a 95 % interval


class Counts(Protocol):
    """The part of `EpisodeCounts` that is read here."""

    episodes: int
    successes: int
    returns: float
    turns: int
    tool_calls: int
    malformed_calls: int
    failed_calls: int
    cut: int
    generated_tokens: int
    tasks: Any  # Counter[(episodes judged, successes)]

    @property
    def judged(self) -> int: ...


def summarise(counts: Counts, k: int) -> dict[str, float | int | None]:
    """The numbers of an evaluation with `k` episodes a task. A share of nothing is None."""
    tasks = counts.tasks.total()
    success = rate(counts.successes, counts.judged)
    low, high = interval(success, tasks)
    found: dict[str, float | int | None] = {
        "success": success, "success_low": low, "success_high": high, "samples": k, "return_mean": rate(counts.returns, counts.judged),
        "turns_mean": rate(counts.turns, counts.judged), "tool_calls_mean": rate(counts.tool_calls, counts.judged),
        "executed_calls": counts.tool_calls - counts.malformed_calls, "failed_calls": counts.failed_calls, "malformed_calls": counts.malformed_calls,
        "truncation_rate": rate(counts.cut, counts.judged), "tokens_per_success": rate(counts.generated_tokens, counts.successes)}
    if k > 1:
        found["pass_at_k"] = pass_at(counts.tasks, k)
        found["pass_at_k_low"], found["pass_at_k_high"] = interval(found["pass_at_k"], tasks)
    return found


def pass_at(tasks: Mapping[tuple[int, int], int], k: int) -> float | None:
    """Mean over tasks of the probability that k of its n episodes, taken at random, hold a success: 1 - C(n - c, k) / C(n, k) for c successes
    (Chen et al. 2021, arXiv 2107.03374). `tasks`: how many there are by (n, c). A task with fewer than k episodes, because some failed, counts with
    all it has."""
    found = [((1 - math.comb(n - c, min(k, n)) / math.comb(n, min(k, n))), times) for (n, c), times in tasks.items()]
    return rate(sum(value * times for value, times in found), sum(times for _, times in found))


def interval(mean: float | None, tasks: int) -> tuple[float | None, float | None]:
    """Wilson's 95 % interval of a mean of `tasks` values in [0, 1]: right for yes or no, and wider than needed for means of several episodes."""
    if mean is None or not tasks:
        return None, None
    centre, spread = mean + Z**2 / (2 * tasks), Z * math.sqrt(mean * (1 - mean) / tasks + Z**2 / (4 * tasks**2))
    return tuple(min(1.0, max(0.0, (centre + sign * spread) / (1 + Z**2 / tasks))) for sign in (-1, 1))  # type: ignore[return-value]


def score_lines(event: Mapping[str, Any]) -> list[str]:
    """An evaluation's numbers for people, after its one line."""
    k = event["samples"]
    lines = [f"  pass@1{f' = avg@{k}' if k > 1 else ''}  {_share(event['success'], event['success_low'], event['success_high'])}"]
    if k > 1:
        lines.append(f"  pass@{k}  {_share(event['pass_at_k'], event['pass_at_k_low'], event['pass_at_k_high'])}")
    tokens = event["tokens_per_success"]
    return [*lines, f"  mean return {_number(event['return_mean'])}, {_number(event['turns_mean'])} turns and {_number(event['tool_calls_mean'])} "
            f"tool calls a task; {event['executed_calls']} calls run, {event['failed_calls']} of them failed, {event['malformed_calls']} malformed",
            f"  {_share(event['truncation_rate'])} of the episodes cut short, {'-' if tokens is None else f'{tokens:,.0f}'} tokens a success"]


def _share(value: float | None, low: float | None = None, high: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" + ("" if low is None or high is None else f" (95 % interval {100 * low:.1f} to {100 * high:.1f})")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def rate(part: float, whole: float) -> float | None:
    """part / whole; None of nothing."""
    return part / whole if whole else None
