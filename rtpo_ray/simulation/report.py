"""What a simulation says: sweeps of RTPO and GRPO as a table and as JSON, and the best split of so many GPUs as a figure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtpo_ray.algorithms.base import Algorithm
from rtpo_ray.algorithms.grpo import Grpo
from rtpo_ray.algorithms.rtpo import Rtpo
from rtpo_ray.simulation.fit import fit
from rtpo_ray.simulation.model import Machine, Work, load_machine
from rtpo_ray.simulation.sweep import Shape, Sweep, like, simulate

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the GPUs, that learn
HEADER = ("method", "overlap", "generators", "learners", "sweep s", "sample", "learn", "push", "other", "generators busy", "learners busy",
          "s / 1,000 siblings", "s / 10^6 tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is simulated: RTPO and GRPO with as many generated tokens, and with as many trained ones."""

    machine: Machine
    work: Work
    rtpo: Algorithm
    generated: Algorithm  # GRPO
    trained: Algorithm  # GRPO
    source: str  # where the parameters are from


def scene(run: str, machine_file: str, *, trunks: int | None, siblings: int | None, shared: bool | None, seed: int) -> Scene:
    """From a run's metrics, or else from a file. Raises ConfigError."""
    method: Algorithm = Rtpo()
    if run:
        fitted = fit(run)
        machine, work = fitted.machine, fitted.work
        method = fitted.method if isinstance(fitted.method, Rtpo) else method
        source = f"fitted to {run}: a sweep took {fitted.measured:.2f} s, simulated {fitted.simulated:.2f} s"
    else:
        machine, drawn = load_machine(Path(machine_file))
        work, source = drawn.work(seed), f"as {machine_file} says"
    method = replace(method, **{name: value for name, value in (("n_trunks", trunks), ("n_siblings", siblings)) if value is not None})
    work = work if shared is None else replace(work, shared=shared)
    one, grpo = Shape(generators=1, ranks=1), Grpo()
    ours, theirs = (simulate(each, work, machine, one, seed) for each in (method, grpo))
    return Scene(machine=machine, work=work, rtpo=method, source=source, generated=like(grpo, work, theirs, ours, "generated"),
                 trained=like(grpo, work, theirs, ours, "trained"))


def rows(what: Scene, generators: Sequence[int], learners: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """A row a method, shape and way to learn; under "grpo" RTPO's rows have its seconds a token over GRPO's."""
    found = []
    for count in generators:
        for ranks in learners:
            for overlap in (False, True):
                shape = Shape(generators=count, ranks=ranks, overlap=overlap)
                sweeps = [simulate(method, what.work, what.machine, shape, seed) for method in (what.rtpo, what.generated, what.trained)]
                ratios = {name: _a_token(sweeps[0], name) / _a_token(other, name)
                          for name, other in zip(("generated", "trained"), sweeps[1:], strict=True)}
                found += [_row("rtpo", sweeps[0]) | {"grpo": ratios}, _row("grpo", sweeps[1])]
    return found


def _a_token(sweep: Sweep, kind: str) -> float:
    return sweep.seconds / max(sweep.sum(f"{kind}_tokens"), 1e-9)


def _row(method: str, sweep: Sweep) -> dict[str, Any]:
    return {"method": method, **dataclasses.asdict(sweep.shape), "seconds": sweep.seconds,
            "phases": {name: sweep.sum(name) for name in ("generate", "learn", "push")}
            | {"other": sweep.sum("other") + sweep.outside},
            "generators_busy": sweep.generators_busy, "learners_busy": sweep.learners_busy, "siblings": sweep.siblings,
            "generated_tokens": sweep.sum("generated_tokens"), "trained_tokens": sweep.sum("trained_tokens"),
            "parts": [dataclasses.asdict(part) | {"total": part.total} for part in sweep.parts]}


def lines(what: Scene, found: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    made = [f"Parameters: {what.source}.", "", "| " + " | ".join(HEADER) + " |", "|---|---|" + "--:|" * (len(HEADER) - 2)]
    for row in found:
        phases = [f"{row['phases'][name]:.2f}" for name in ("generate", "learn", "push", "other")]
        cells = [row["method"], "on" if row["overlap"] else "off", str(row["generators"]), str(row["ranks"]), f"{row['seconds']:.2f}", *phases,
                 f"{row['generators_busy']:.0%}", f"{row['learners_busy']:.0%}", f"{1000 * row['seconds'] / row['siblings']:.2f}",
                 f"{1e6 * row['seconds'] / row['generated_tokens']:.2f}"]
        made.append("| " + " | ".join(cells) + " |")
    made += ["", f"GRPO samples {what.generated.n_trunks} chains a task, about as many tokens as RTPO, and with overlap learns tasks as they are "
             f"complete. RTPO's seconds a token over GRPO's "
             f"({what.trained.n_trunks} chains for as many trained tokens):", "",
             "| overlap | generators | learners | at equal generated tokens | at equal trained tokens |", "|---|--:|--:|--:|--:|"]
    made += [f"| {'on' if row['overlap'] else 'off'} | {row['generators']} | {row['ranks']} | {row['grpo']['generated']:.2f} | "
             f"{row['grpo']['trained']:.2f} |" for row in found if row["method"] == "rtpo"]
    return made + (_by_part(found) if len({(row["generators"], row["ranks"]) for row in found}) == 1 else [])


def _by_part(found: Sequence[dict[str, Any]]) -> list[str]:
    """Trunks and stages of each sweep, for one shape."""
    made = ["", "| method | overlap | part | rollouts | seconds | sample | learn | push | other | generators busy | learners busy |",
            "|---|---|---|" + "--:|" * 8]
    for row in found:
        for part in row["parts"]:
            name = {-1: "trunks", None: "all turns"}.get(part["turn"], f"turn {part['turn']}")
            seconds = [f"{part[field]:.2f}" for field in ("total", "generate", "learn", "push", "other")]
            total = max(part["total"], 1e-9)
            busy = [f"{part['generator_busy'] / (row['generators'] * total):.0%}", f"{part['learner_busy'] / total:.0%}"]
            cells = [row["method"], "on" if row["overlap"] else "off", name, f"{part['rollouts']:,}", *seconds, *busy]
            made.append("| " + " | ".join(cells) + " |")
    return made


# --- many GPUs


def best_split(method: Algorithm, work: Work, machine: Machine, gpus: int, overlap: bool, seed: int = 0) -> Sweep:
    """The fastest sweep on `gpus`, one a generator and one a learner rank, over the shares that may learn."""
    ranks = {min(gpus - 1, max(machine.least_ranks, round(share * gpus))) for share in SHARES}
    sweeps = [simulate(method, work, machine, Shape(generators=gpus - each, ranks=each, overlap=overlap), seed) for each in sorted(ranks)]
    return min(sweeps, key=lambda sweep: sweep.seconds)


def scaling(what: Scene, gpus: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """The best split for every number of GPUs, method and way to learn; the work of a sweep is always the same."""
    found = []
    for name, method in (("rtpo", what.rtpo), ("grpo", what.generated)):
        for overlap in (False, True):
            for count in gpus:
                sweep = best_split(method, what.work, what.machine, count, overlap, seed)
                busy = (sweep.generators_busy * sweep.shape.generators + sweep.learners_busy * sweep.shape.ranks) / count
                found.append({"method": name, "overlap": overlap, "gpus": count, "learners": sweep.shape.ranks, "seconds": sweep.seconds,
                              "seconds_per_1000_siblings": 1000 * sweep.seconds / sweep.siblings, "busy": busy,
                              "seconds_per_million_tokens": 1e6 * sweep.seconds / sweep.sum("generated_tokens")})
    return found


def draw(path: Path, what: Scene, points: Sequence[dict[str, Any]]) -> None:
    """Three panels against the number of GPUs: time, use, split."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    tokens = next(p["seconds_per_1000_siblings"] / p["seconds_per_million_tokens"] for p in points if p["method"] == "rtpo")  # 10^6, of 1,000
    panels: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("seconds for 1,000 siblings (GRPO: as many tokens)", lambda p: p["seconds_per_million_tokens"] * tokens),
        ("share of GPU time at work", lambda p: p["busy"]), ("share of GPUs that learn, best split", lambda p: p["learners"] / p["gpus"])]
    for axes, (title, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for method, colour in (("rtpo", "tab:blue"), ("grpo", "tab:orange")):
            for overlap in (False, True):
                mine = [p for p in points if p["method"] == method and p["overlap"] == overlap]
                axes.plot([p["gpus"] for p in mine], [value(p) for p in mine], color=colour, linestyle="-" if overlap else "--", marker=".",
                          label=f"{method.upper()}, learning {'while sampling' if overlap else 'after sampling'}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({p["gpus"] for p in points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
        if axes is figure.axes[0]:
            axes.set_yscale("log")
            axes.legend(fontsize=7)
        else:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    figure.suptitle(f"Simulated: {what.work.tasks:,} tasks a sweep, up to {what.work.turns} turns; {what.source}", fontsize=10)
    figure.savefig(path)


def report(what: Scene, *, generators: Sequence[int], learners: Sequence[int], figure: str, as_json: bool, seed: int,
           say: Callable[[str], None]) -> None:
    """Print the table, or JSON; draw the figure if it is asked for."""
    found = rows(what, generators, learners, seed)
    points = scaling(what, GPUS, seed) if figure else []
    if as_json:
        say(json.dumps({"source": what.source, "machine": dataclasses.asdict(what.machine), "sweeps": found, "scaling": points}))
    else:
        for line in lines(what, found):
            say(line)
    if figure:
        draw(Path(figure), what, points)
