"""What a comparison of methods found: a row a run, a row a method, and success against generated tokens."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import numpy as np

Event = dict[str, Any]
Curve = Sequence[tuple[float, float]]  # (tokens generated in training so far, success on the held-out tasks), in order

LEVEL = 0.8  # success whose cost in tokens is reported
COLUMNS = ("method", "seed", "final_success", "area", "tokens_to_80", "tokens", "seconds", "zero_advantage_rate", "ratio_drift", "k3", "lost",
           "error")
PERCENT = (".1f", 100, " %")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run. A figure is None when the run failed, or when there is nothing to take it of."""

    method: str
    seed: int
    error: str = ""  # why the run failed, one line
    curve: Curve = ()
    final_success: float | None = None  # at the budget, linear between evaluations
    area: float | None = None  # under the curve, over the budget
    tokens_to_80: float | None = None  # None: not within the budget
    tokens: int | None = None  # generated in training
    seconds: float | None = None  # of training, evaluations excluded
    zero_advantage_rate: float | None = None  # mean over groups
    ratio_drift: float | None = None  # largest |ratio_geomean - 1| of a stage
    k3: float | None = None  # mean over stages
    lost: int = 0  # rollouts that failed; in evaluations they count as no success


def read_events(metrics: Path) -> list[Event]:
    """The events of a metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def run_result(method: str, seed: int, events: Sequence[Event], budget: float) -> RunResult:
    """The figures of a finished run; `budget` in generated tokens."""
    stages, sweeps = ([event for event in events if event["kind"] == kind] for kind in ("stage", "sweep"))
    curve = tuple((event["tokens"], event["success"]) for event in events if event["kind"] == "eval" and event["success"] is not None)
    grouped = [stage for stage in stages if stage["zero_advantage_rate"] is not None]
    groups = sum(stage["groups"] for stage in grouped)
    k3 = [stage["k3"] for stage in stages if stage["k3"] is not None]
    return RunResult(
        method=method, seed=seed, curve=curve, final_success=at(curve, budget), area=area(curve, budget), tokens_to_80=tokens_to(curve, budget),
        tokens=sum(event["generated_tokens"] for event in [*stages, *sweeps]), seconds=sum(sweep["seconds"]["total"] for sweep in sweeps),
        zero_advantage_rate=sum(stage["groups"] * stage["zero_advantage_rate"] for stage in grouped) / groups if groups else None,
        ratio_drift=max((abs(stage["ratio_geomean"] - 1) for stage in stages if stage["ratio_geomean"] is not None), default=None),
        k3=statistics.fmean(k3) if k3 else None, lost=sum(sum(event["failed"].values()) for event in events if "failed" in event))


def at(curve: Curve, budget: float) -> float | None:
    """Success at `budget`, linear between evaluations, since a run ends with the sweep that spends it; the last value holds. None without a point."""
    return float(_at(np.array([budget]), curve)[0]) if curve else None


def area(curve: Curve, budget: float) -> float | None:
    """Area under the curve from 0 to `budget`, over `budget`; the last value holds to the end. None without a point."""
    if not curve:
        return None
    grid = _grid([curve], budget)
    return float(np.trapezoid(_at(grid, curve), grid)) / budget


def tokens_to(curve: Curve, budget: float, level: float = LEVEL) -> float | None:
    """Tokens at which the curve first reaches `level`, linear between evaluations; None when it does not within the budget."""
    for number, (tokens, success) in enumerate(curve):
        if success >= level:
            before, lower = curve[number - 1] if number else (tokens, success)
            found = tokens if success == lower else before + (tokens - before) * (level - lower) / (success - lower)
            return found if found <= budget * (1 + 1e-9) else None
    return None


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half the width of its 95 % t-interval); a single value has no interval."""
    mean, count = statistics.fmean(values), len(values)
    return mean, _t(count - 1) * statistics.stdev(values) / count**0.5 if count > 1 else None


def _t(df: int) -> float:
    """The 97.5 % quantile of Student's t; 12.7 at one degree of freedom, and above 1.9 always."""
    return float(mpmath.findroot(lambda t: mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True) - 0.05, (1.9, 13), solver="anderson"))


def mean_curve(curves: Sequence[Curve], budget: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, mean, least, most) of several curves from 0 to `budget`, at every point that one of them has."""
    grid = _grid(curves, budget)
    values = np.stack([_at(grid, curve) for curve in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _grid(curves: Iterable[Curve], budget: float) -> np.ndarray:
    return np.array(sorted({0.0, float(budget)} | {float(tokens) for curve in curves for tokens, _ in curve if 0 <= tokens <= budget}))


def _at(grid: np.ndarray, curve: Curve) -> np.ndarray:
    """The curve on a grid, its first and last value held outside."""
    return np.interp(grid, [tokens for tokens, _ in curve], [success for _, success in curve])


def write_comparison(folder: Path, results: Sequence[RunResult], budget: int, optimum: float | None = None) -> None:
    """table.md, table.csv and curves.png. `optimum`: the best possible success, drawn as a line."""
    (folder / "table.md").write_text(markdown(results, budget))
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        rows.writeheader()
        rows.writerows(dataclasses.asdict(result) for result in results)
    plot(folder / "curves.png", results, budget, optimum)


def markdown(results: Sequence[RunResult], budget: int) -> str:
    """A row a method, then what a reader must know of single runs."""
    lines = ["| method | seeds | final success | area | tokens to 80 % | seconds | equal | drift | k3 |", "|---|" + "--:|" * 8]
    for method, finished in _by_method(results).items():
        cells = [_spread(finished, "final_success", *PERCENT), _spread(finished, "area", *PERCENT), _reached(finished),
                 _spread(finished, "seconds", ",.0f"), _spread(finished, "zero_advantage_rate", *PERCENT),
                 _spread(finished, "ratio_drift", ".1e"), _spread(finished, "k3", ".1e")]
        lines.append(f"| {method} | {len(finished)} | {' | '.join(cells)} |")
    lines += ["", f"Budget: {budget:,} generated tokens a run. Mean over the seeds, ± half the width of its 95 % t-interval. `final success`: at the "
              "budget, linear between evaluations; `area`: mean success "
              "over the budget; `seconds`: of training; `equal`: share of groups whose returns are all equal; `drift`: largest distance of a stage's "
              "`ratio_geomean` from 1; `k3`: mean over the stages."]
    short = [f"{run.method} seed {run.seed} ({run.tokens:,})" for run in results if run.tokens is not None and run.tokens < budget]
    lines += ["", f"Ended before the budget: {', '.join(short)}."] if short else []
    lost = [f"{run.method} seed {run.seed} ({run.lost:,})" for run in results if run.lost]
    lines += ["", f"Rollouts lost to errors, which evaluations count as no success: {', '.join(lost)}."] if lost else []
    failed = [f"- {run.method} seed {run.seed}: {run.error}" for run in results if run.error]
    lines += ["", "Failed, and in no figure above:", "", *failed] if failed else []
    return "\n".join(lines) + "\n"


def _by_method(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Finished runs of every method, in the order of first appearance; a method whose runs all failed stays, with none."""
    return {method: [run for run in results if run.method == method and not run.error] for method in dict.fromkeys(run.method for run in results)}


def _spread(runs: Sequence[RunResult], figure: str, spec: str, scale: float = 1, unit: str = "") -> str:
    """Mean and interval of one figure over the runs that have it."""
    values = [scale * value for run in runs if (value := getattr(run, figure)) is not None]
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:{spec}}" + ("" if half is None else f" ± {half:{spec}}") + unit


def _reached(runs: Sequence[RunResult]) -> str:
    reached = [run.tokens_to_80 for run in runs if run.tokens_to_80 is not None]
    return f"{len(reached)} of {len(runs)}" + (f", median {statistics.median(reached):,.0f}" if reached else "")


def plot(path: Path, results: Sequence[RunResult], budget: int, optimum: float | None = None) -> None:
    """Success against generated tokens: a method's mean over its seeds, and the band from its worst to its best."""
    from matplotlib import color_sequences
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    methods = _by_method(results)
    colours = color_sequences["tab10" if len(methods) <= 10 else "tab20"]
    for number, (method, runs) in enumerate(methods.items()):
        curves = [run.curve for run in runs if run.curve]
        if curves:
            grid, mean, least, most = mean_curve(curves, budget)
            colour = colours[number % len(colours)]
            axes.plot(grid, mean, color=colour, label=f"{method} ({len(curves)} seed{'s' * (len(curves) > 1)})")
            axes.fill_between(grid, least, most, color=colour, alpha=0.2, linewidth=0)
    if optimum is not None:
        axes.axhline(optimum, color="black", linestyle="--", linewidth=1, label="optimum")
    axes.set(xlabel="generated tokens", ylabel="success on held-out tasks", xlim=(0, budget), ylim=(0, 1.02))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=150)
