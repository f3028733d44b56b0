"""The parameters of a machine, from what a run on it measured.

metrics.jsonl has the seconds of every stage by phase, and its tokens; the trunks that a run keeps to be resumed from have the lengths of single
responses. The simulated sweep of the run's own configuration is brought as near to the measured one as it gets (Levenberg-Marquardt in the
logarithms of the parameters, with a weak pull to where it began, which decides what the run cannot tell apart).
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Algorithm
from rtpo_ray.config import Config, load_config
from rtpo_ray.errors import ConfigError
from rtpo_ray.simulation.model import Episode, Machine, Returns, Turn, Work
from rtpo_ray.simulation.sweep import Shape, Sweep, simulate

CPU_BLOCK, GPU_BLOCK = 32, 16  # tokens of a block of vLLM's prefix cache
BACKWARD = 3.0  # a position of forward and backward passes against one of the forward pass alone
PASSES = 3.0  # over a rollout's rows where its trunk is its sibling: counting, grouping and crediting it, each about what crediting alone takes
FREE = ("step", "sequence", "turn", "learner_token", "update")
PULL = 0.03  # of the start, against a residual of the whole sweep's seconds
ROUNDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A machine and a workload as a run showed them."""

    config: Config
    method: Algorithm
    machine: Machine
    work: Work
    shape: Shape
    measured: float  # seconds of a sweep
    simulated: float

    @property
    def error(self) -> float:
        """Of the fit itself, relative."""
        return self.simulated / self.measured - 1


def measured_sweeps(folder: Path) -> list[dict[str, Any]]:
    """Every whole sweep of the run, without the first, which warms up, if there are others: seconds by phase ("total", ...) and, under
    "stages", the events of its stages. Raises ConfigError when there is none."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no metrics.jsonl; expected the folder of a run, such as runs/NAME")
    sweeps, stages = list[dict[str, Any]](), list[dict[str, Any]]()
    for event in map(json.loads, path.read_text().splitlines()):
        if event["kind"] == "stage":
            stages.append(event)
        elif event["kind"] == "resume":
            stages = []
        elif event["kind"] == "sweep":
            mine = [stage for stage in stages if stage["sweep"] == event["sweep"]]
            sweeps.append({**event["seconds"], "stages": mine, "event": event})
            stages = []
    if not sweeps:
        raise ConfigError(f"{path} holds no whole sweep; expected at least one, better three")
    return sweeps[1:] or sweeps


def fit(folder: str | Path, of: Callable[[Iterable[float]], float] = statistics.median, crowding: float = 1.0) -> Fitted:
    """Of the run in `folder`. `of`: of the seconds of several sweeps; min where others disturbed them, which only adds. `crowding`: of the machine,
    which one run cannot tell. Raises ConfigError."""
    folder = Path(folder).expanduser()
    sweeps = measured_sweeps(folder)
    config = load_config(folder / "config.yaml", ["cluster.address=elsewhere"])
    method = algorithms.build(config.algorithm)
    work = _work(config, method, folder, sweeps)
    shape = Shape(generators=config.generators.min, ranks=config.learner.ranks, overlap=overlaps(config, method))
    start = _start(config, sweeps, of, crowding)
    seconds = _phases(sweeps, of)
    total = of(sweep["total"] for sweep in sweeps)

    def at(point: np.ndarray) -> tuple[Machine, Sweep]:
        values = dict(zip(FREE, np.exp(point).tolist(), strict=True))
        ratio = start.generator_threads / start.learner_threads  # a forward pass on as many cores
        machine = replace(start, **values, prefill=values["learner_token"] / BACKWARD / ratio)
        return machine, simulate(method, work, machine, shape)

    began = np.log([getattr(start, name) for name in FREE])

    def residuals(point: np.ndarray) -> np.ndarray:
        parts = {part.turn: part for part in at(point)[1].parts}
        wrong = [(getattr(parts[turn], phase) - value) / total for (turn, phase), value in seconds.items() if turn in parts]
        return np.array([*wrong, *(PULL / len(FREE) * (point - began))])

    machine, sweep = at(_levenberg_marquardt(residuals, began))
    return Fitted(config=config, method=method, machine=machine, work=work, shape=shape, measured=total, simulated=sweep.seconds)


def overlaps(config: Config, method: Algorithm) -> bool:
    """Whether the learner takes groups while others are sampled: if the configuration says so and their gradient adds up."""
    return config.run.overlap and method.objective.adds_up


def _levenberg_marquardt(residuals: Callable[[np.ndarray], np.ndarray], point: np.ndarray) -> np.ndarray:
    """Where the sum of squares is least; the Jacobian from differences."""
    here, damping = residuals(point), 1e-2
    for _ in range(ROUNDS):
        jacobian = np.stack([(residuals(point + 0.02 * axis) - here) / 0.02 for axis in np.eye(len(point))], axis=1)
        square = jacobian.T @ jacobian
        for _ in range(6):
            step = np.linalg.solve(square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(point))), -jacobian.T @ here)
            there = residuals(point + np.clip(step, -1.5, 1.5))
            if there @ there < here @ here:
                point, here, damping = point + np.clip(step, -1.5, 1.5), there, damping / 4
                break
            damping *= 4
        else:
            break
    return point


def _start(config: Config, sweeps: Sequence[dict[str, Any]], of: Callable[[Iterable[float]], float], crowding: float) -> Machine:
    """What can be read off, and guesses of the rest."""
    stages = [stage for sweep in sweeps for stage in sweep["stages"] if stage["optimizer_steps"]]
    if not stages:
        raise ConfigError("no stage of the run was learned from; expected a run in which returns differ")
    on_cpu, generators, learner = not config.generators.gpus, config.generators, config.learner
    learn = sum(_learning(stage) for stage in stages)
    positions = sum(stage["learner_tokens"] for stage in stages)
    machine = Machine(
        ordered=config.sampling.in_order, slots=generators.max_num_seqs,
        cache_block=CPU_BLOCK if on_cpu else GPU_BLOCK, generator_threads=generators.threads if on_cpu else 1,
        learner_threads=learner.threads if on_cpu else 1, cores=os.cpu_count() or 1 if on_cpu else 0, crowding=crowding,
        step=3e-3, sequence=1e-4, turn=3e-4,
        learner_token=0.8 * learn / positions * learner.ranks, update=0.1 * learn / len(stages),
        rollout=PASSES * of(stage["seconds"].get("credit", 0.0) / stage["siblings"] for stage in stages),
        chunk=getattr(config.sampling, "chunk_groups", 8))
    stage = of(stage["seconds"]["other"] - (machine.rollout * stage["siblings"] if stage["turn"] is None else 0.0) for stage in stages)
    push = of(stage["seconds"]["broadcast"] for stage in stages) / machine.slowdown(generators.min * machine.generator_threads)
    rest = of(sweep["total"] - sum(stage["seconds"]["total"] for stage in sweep["stages"]) - _trunks(sweep) for sweep in sweeps)
    return replace(machine, push=push, stage=max(0.0, stage), sweep=max(0.0, rest - max(0.0, stage)))


def _trunks(sweep: dict[str, Any]) -> float:
    """Seconds in which trunks were sampled."""
    return max(0.0, float(sweep["generate"]) - sum(stage["seconds"]["generate"] for stage in sweep["stages"]))


def _learning(stage: dict[str, Any]) -> float:
    """Seconds in which the learner computed, also while others sampled."""
    return float(stage["seconds"]["learn"]) + float(stage["seconds"].get("overlapped", 0.0))


def _phases(sweeps: Sequence[dict[str, Any]], of: Callable[[Iterable[float]], float]) -> dict[tuple[int | None, str], float]:
    """Seconds by (turn, phase); turn -1: trunks. What the learner takes is as for the mean positions of its stage: they differ from sweep to
    sweep."""
    found: dict[tuple[int | None, str], list[float]] = {}
    positions: dict[int | None, list[int]] = {}
    for sweep in sweeps:
        for stage in sweep["stages"]:
            positions.setdefault(stage["turn"], []).append(stage["learner_tokens"])
    for sweep in sweeps:
        found.setdefault((-1, "generate"), []).append(_trunks(sweep))
        for stage in sweep["stages"]:
            turn = stage["turn"]
            scale = statistics.fmean(positions[turn]) / max(stage["learner_tokens"], 1)
            found.setdefault((turn, "learn"), []).append(stage["seconds"]["learn"] * scale)
            found.setdefault((turn, "learner_busy"), []).append(_learning(stage) * scale)
            if turn is not None:
                found.setdefault((turn, "generate"), []).append(stage["seconds"]["generate"])
    return {key: of(values) for key, values in found.items()}


# --- the work of a sweep


def _work(config: Config, method: Algorithm, folder: Path, sweeps: Sequence[dict[str, Any]]) -> Work:
    turns = config.environment.max_turns
    episodes = recorded(folder) or _from_means(method, turns, sweeps)
    plain = Work(tasks=config.sampling.tasks_per_sweep, turns=turns, episodes=episodes, returns=_returns(turns, sweeps))
    found = _positions(sweeps)
    padding = found / _simulated_positions(method, plain)
    if padding > 0.8:
        return replace(plain, padding=padding)
    shared = replace(plain, shared=True)  # fewer positions than tokens: what a group has in common was computed once
    return replace(shared, padding=found / _simulated_positions(method, shared))


def _positions(sweeps: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(sum(stage["learner_tokens"] for stage in sweep["stages"]) for sweep in sweeps)


def _simulated_positions(method: Algorithm, work: Work) -> float:
    return simulate(method, work, Machine(), Shape(generators=1, ranks=1)).sum("learner_tokens")


def recorded(folder: Path) -> tuple[Episode, ...]:
    """The trunks that the run has kept; none when they are gone."""
    import pyarrow.compute as pc
    from pyarrow import feather

    made: list[Episode] = []
    for path in sorted(folder.glob("trunks/sweep-*/*.arrow")):
        column = feather.read_table(path, columns=["turns"])["turns"].combine_chunks()
        flat = pc.list_flatten(column)
        lengths = zip(*(pc.list_value_length(pc.struct_field(flat, name)).to_pylist() for name in ("context_ids", "response_ids")), strict=True)
        for size in pc.list_value_length(column).to_pylist():
            made.append(tuple(Turn(*next(lengths)) for _ in range(size)))
    return tuple(episode for episode in made if episode)


def _returns(turns: int, sweeps: Sequence[dict[str, Any]]) -> tuple[Returns, ...]:
    """Of every turn; of the nearest one that was measured where there is none."""
    known: dict[int, Returns] = {}
    stages = [stage for sweep in sweeps for stage in sweep["stages"] if stage["groups"]]
    for turn in {stage["turn"] for stage in stages}:
        mine = [stage for stage in stages if stage["turn"] == turn]
        siblings, groups = sum(stage["siblings"] for stage in mine), sum(stage["groups"] for stage in mine)
        mean = sum(stage["success"] * stage["siblings"] for stage in mine) / siblings
        equal = sum(stage["zero_advantage_rate"] * stage["groups"] for stage in mine) / groups
        known[turn or 0] = Returns.of(mean, equal, round(siblings / groups))
    return tuple(known[min(known, key=lambda k: abs(k - turn))] for turn in range(turns))


def _from_means(method: Algorithm, turns: int, sweeps: Sequence[dict[str, Any]], count: int = 512) -> tuple[Episode, ...]:
    """Episodes that a run without kept trunks would have had: means of every turn, log-normal responses.

    Siblings of turn k have g_k = r_k + s_k g_{k+1} tokens, r_k of turn k itself and s_k the share of trunks that go on; prompts likewise.
    """
    stages = {turn: [stage for sweep in sweeps for stage in sweep["stages"] if stage["turn"] == turn] for turn in range(turns)}
    trunks = sum(sweep["event"]["tasks"] for sweep in sweeps) * method.n_trunks
    mean_turns = statistics.fmean(sweep["event"]["trunk_turns_mean"] or 1.0 for sweep in sweeps)
    if not all(stages.values()):  # no stage a turn: turns are alike
        every = [stage for sweep in sweeps for stage in sweep["stages"]]
        siblings = sum(stage["siblings"] for stage in every) * mean_turns
        return _draw([(sum(stage["prompt_tokens"] for stage in every) / siblings, sum(stage["generated_tokens"] for stage in every) / siblings,
                       min(1.0, (mean_turns - 1) / max(turns - 1, 1)))] * turns, count)
    reached = [sum(stage["groups"] for stage in stages[turn]) for turn in range(turns)] + [0]
    reached[0] = trunks
    means, later = list[tuple[float, float, float]](), (0.0, 0.0)
    for turn in reversed(range(turns)):
        siblings = sum(stage["siblings"] for stage in stages[turn])
        prompt, made = (sum(stage[name] for stage in stages[turn]) / siblings for name in ("prompt_tokens", "generated_tokens"))
        on = min(1.0, reached[turn + 1] / reached[turn])
        means.append((prompt - on * later[0], made - on * later[1], on))
        later = (prompt, made)
    return _draw(means[::-1], count)


def _draw(means: Sequence[tuple[float, float, float]], count: int) -> tuple[Episode, ...]:
    """From (context, response, probability to go on) of every turn; the standard deviation of a response's tokens is half their mean."""
    rng, sigma = random.Random(0), float(np.sqrt(np.log1p(0.25)))
    made = []
    for number in range(count):
        place, alive, episode = (number + 0.5) / count, 1.0, []
        for context, response, on in means:
            tokens = rng.lognormvariate(float(np.log(max(response, 1.0))) - sigma**2 / 2, sigma)
            episode.append(Turn(max(1, round(context)), max(1, round(tokens))))
            alive *= on
            if place > alive:
                break
        made.append(tuple(episode))
    return tuple(made)
