"""Compare methods at an equal budget of generated tokens: every method with every seed, one run after the other.

A comparison file has the ordinary sections, shared by all runs, and one more:

    compare:
      name: lookup                # everything goes to run.root/lookup
      seeds: [0, 1, 2]
      methods:                    # label -> sections merged over the shared ones
        rtpo: {algorithm: {name: rtpo}}
        slow: {algorithm: {name: rtpo}, learner: {lr: 1e-4}}
      optimum: 0.9                # best possible success, drawn as a line; may be left out

A comparison that was stopped goes on where it stopped: finished runs are kept, a killed or failed one is moved aside and run again.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rtpo_ray.config import Config, hash_config, load_layers, parse_overrides, read_yaml, to_yaml
from rtpo_ray.errors import ConfigError, RtpoError
from rtpo_ray.folders import alone_in
from rtpo_ray.reports.comparison import RunResult, read_events, run_result, write_comparison

FIELDS = ("name", "seeds", "methods", "optimum")
OWN = {"name": "compare.methods and compare.seeds", "seed": "compare.seeds", "experiment": "compare.name"}  # fields of run that a comparison sets

Layers = list[tuple[str, DictConfig]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of a comparison."""

    label: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.root).expanduser().resolve() / self.config.run.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every run, in the order in which they are made: all methods with the first seed, then all with the next."""

    name: str
    seeds: tuple[int, ...]
    runs: tuple[Entry, ...]
    optimum: float | None = None

    @property
    def folder(self) -> Path:
        return self.runs[0].folder.parent

    @property
    def budget(self) -> int:
        """Generated tokens of a run; the same for all."""
        return self.runs[0].config.run.tokens


def load_comparison(path: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Defaults, then the file's shared sections, then the method's own, then `section.field=value` overrides. Raises ConfigError."""
    split = [(origin, *_split(origin, layer)) for origin, layer in [(str(path), read_yaml(Path(path))), *parse_overrides(overrides)]]
    name, seeds, methods, optimum = _section([(origin, own) for origin, own, _ in split])
    (file, *later) = [(origin, shared) for origin, _, shared in split]
    configs = {label: _method_config(label, [file, (str(path), OmegaConf.create(method)), *later]) for label, method in methods.items()}
    _check_budgets(configs)
    _check_common(configs)
    runs = tuple(Entry(label=label, seed=seed, config=_run_config(config, name, label, seed)) for seed in seeds for label, config in configs.items())
    return Comparison(name=name, seeds=tuple(seeds), runs=runs, optimum=optimum)


def run_comparison(comparison: Comparison, train: Callable[[Config], None], say: Callable[[str], None]) -> Path:
    """Make every run that is not finished; returns the folder, which holds table.md, table.csv and curves.png.

    They are written after every run. A run that fails is recorded as failed and the next one starts.
    """
    folder = comparison.folder
    with alone_in(folder, "comparison", "compare.name", ".compare.lock"):  # another process would take a run that is under way for a killed one
        waiting = unfinished(comparison)
        _report(comparison)
        for number, entry in enumerate(comparison.runs, 1):
            run = f"run {number}/{len(comparison.runs)}: {entry.config.run.name}"
            if entry not in waiting:
                say(f"{run} is finished already")
                continue
            if (aside := _move_aside(entry.folder)) is not None:
                say(f"{run} was not finished and is made again; what there was is now {aside}")
            else:
                say(run)
            config_hash, error = hash_config(entry.config), ""
            try:
                train(entry.config)
            except Exception as failure:  # noqa: BLE001 - a method of the user's may raise anything; the other methods go on
                error = ": ".join([type(failure).__name__, *str(failure).splitlines()[:1]])
                say(f"{run} failed: {error}" if isinstance(failure, RtpoError) else f"{run} failed:\n{traceback.format_exc()}")
            _write_status(entry.folder, {"status": "failed" if error else "finished", "config_hash": config_hash, "error": error})
            _report(comparison)
    return folder


def unfinished(comparison: Comparison) -> list[Entry]:
    """The runs that are still to be made. Raises ConfigError when one is finished with another configuration."""
    waiting = []
    for entry in comparison.runs:
        status = _read_status(entry.folder)
        if status["status"] != "finished":
            waiting.append(entry)
        elif status["config_hash"] != hash_config(entry.config):
            raise ConfigError(f"field compare.name is {comparison.name!r}: {entry.folder} holds a finished run of another configuration "
                              f"({_differences(entry)}); choose another compare.name or remove that folder")
    return waiting


def _split(origin: str, layer: DictConfig) -> tuple[dict[str, Any], DictConfig]:
    """(the section compare, everything else) of a file or override."""
    shared: dict[str, Any] = OmegaConf.to_container(layer)  # type: ignore[assignment]
    own = shared.pop("compare", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{origin}: compare is a section, not a value ({own!r}); set one of its fields: {', '.join(FIELDS)}")
    for key in own:
        if key not in FIELDS:
            close = difflib.get_close_matches(str(key), FIELDS, n=1)
            hint = f" (did you mean compare.{close[0]}?)" if close else ""
            raise ConfigError(f"{origin}: unknown field compare.{key}{hint}; valid here: {', '.join(FIELDS)}")
    return own, OmegaConf.create(shared)


def _section(parts: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, list[int], dict[str, dict[str, Any]], float | None]:
    """(name, seeds, methods, optimum) of the section compare, checked."""
    merged = OmegaConf.create({})
    for origin, part in parts:
        try:
            merged.merge_with(part)
        except (OmegaConfBaseException, TypeError) as error:
            raise ConfigError(f"{origin}: the section compare: {str(error).splitlines()[0]}") from error
    section: dict[str, Any] = {**dict.fromkeys(FIELDS), **OmegaConf.to_container(merged)}  # type: ignore[dict-item]
    name, seeds, methods, optimum = (section[field] for field in FIELDS)
    if not _is_folder_name(name):
        raise ConfigError(f"field compare.name is {name!r}; expected a plain folder name (letters, digits and . _ + -)")
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"field compare.seeds is {seeds!r}; expected a list of at least one int from 0, such as [0, 1, 2]")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"field compare.seeds is {seeds}; expected every seed once")
    if not isinstance(methods, dict) or not methods:
        raise ConfigError(f"field compare.methods is {methods!r}; expected at least one label with sections, such as {{rtpo: {{algorithm: ...}}}}")
    for label, method in methods.items():
        if not _is_folder_name(label):
            raise ConfigError(f"a label of compare.methods is {label!r}; expected a plain folder name (letters, digits and . _ + -)")
        if not isinstance(method, dict):
            raise ConfigError(f"field compare.methods.{label} is {method!r}; expected sections, such as {{algorithm: {{name: rtpo}}}}")
    if optimum is not None and (type(optimum) not in (int, float) or not 0 <= optimum <= 1):
        raise ConfigError(f"field compare.optimum is {optimum!r}; expected a share in [0, 1]")
    return name, seeds, methods, optimum


def _is_folder_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][\w.+-]*", name, re.ASCII) is not None


def _method_config(label: str, layers: Layers) -> Config:
    """The configuration of a method, checked, before its runs get their names and seeds."""
    try:
        config = load_layers(layers)
    except ConfigError as error:
        raise ConfigError(f"compare.methods.{label}: {error}") from error
    for number, (origin, layer) in enumerate(layers):
        for field in layer.get("run", {}):
            if field in OWN:
                raise ConfigError(f"{origin}: field run.{field} is {layer.run[field]!r}; a comparison sets it for every run, from {OWN[field]}")
            if field == "root" and number == 1:
                raise ConfigError(f"{origin}: field compare.methods.{label}.run.root is {layer.run.root!r}; expected one run.root for all methods")
    if not config.run.eval_tasks:
        raise ConfigError(f"compare.methods.{label}: field run.eval_tasks is 0; expected at least 1, since evaluations are what is compared")
    return config


def _run_config(config: Config, name: str, label: str, seed: int) -> Config:
    """A copy of its own, so that no run can change another's."""
    config = copy.deepcopy(config)
    run = dataclasses.replace(config.run, name=f"{label}-seed{seed}", root=str(Path(config.run.root) / name), seed=seed, experiment=name)
    return dataclasses.replace(config, run=run)


COMMON = {  # what must be the same for all methods, and why
    "cluster": "the runs share one cluster", "run.eval_tasks": "success is compared on the same tasks",
    "environment.name": "success is compared on the same tasks", "environment.path": "success is compared on the same tasks",
    "environment.args": "success is compared on the same tasks",
    "environment.max_turns": "success is compared on the same tasks", "data": "success is compared on the same tasks"}


def _check_common(configs: dict[str, Config]) -> None:
    first = next(iter(configs))
    for label, config in configs.items():
        for name, why in COMMON.items():
            value, expected = (OmegaConf.select(OmegaConf.structured(one), name) for one in (config, configs[first]))
            if value != expected:
                raise ConfigError(f"compare.methods.{label}: field {name} is {value}; expected {expected} as for {first}, since {why}")


def _check_budgets(configs: dict[str, Config]) -> None:
    first, budget = next((label, config.run.tokens) for label, config in configs.items())
    for label, config in configs.items():
        if config.run.tokens <= 0:
            raise ConfigError(f"compare.methods.{label}: field run.tokens is {config.run.tokens}; expected at least 1, the equal budget of all")
        if config.run.tokens != budget:
            raise ConfigError(f"compare.methods.{label}: field run.tokens is {config.run.tokens}; expected {budget} as for {first}, so that the "
                              "methods have an equal budget")


def _move_aside(folder: Path) -> Path | None:
    """What a killed or failed run left goes where no table looks; None when there was nothing."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.parent / "unfinished" / f"{folder.name}-{number}").exists():
        number += 1
    aside.parent.mkdir(exist_ok=True)
    return folder.rename(aside)


def _read_status(folder: Path) -> dict[str, str]:
    """Status, hash and error of a run; status "" when it never ended."""
    file = folder / "status.json"
    empty = {"status": "", "config_hash": "", "error": ""}
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
    except json.JSONDecodeError:  # cut off by a full disk, say: the run is made again
        return empty
    return {**empty, **found} if isinstance(found, dict) else empty


def _write_status(folder: Path, status: dict[str, str]) -> None:
    """At once or not at all: a kill leaves no half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "status.json.part"
    half.write_text(json.dumps(status) + "\n")
    os.replace(half, folder / "status.json")


def _report(comparison: Comparison) -> None:
    results = []
    for entry in comparison.runs:
        status = _read_status(entry.folder)
        if status["status"] == "finished":
            try:
                events = read_events(entry.folder / "metrics.jsonl")
            except (OSError, ValueError) as error:
                raise ConfigError(f"field compare.name is {comparison.name!r}: the metrics of the finished run {entry.folder} cannot be read "
                                  f"({error}); remove that folder to make the run again") from error
            results.append(run_result(entry.label, entry.seed, events, comparison.budget))
        elif status["status"] == "failed":
            results.append(RunResult(method=entry.label, seed=entry.seed, error=status["error"]))
    write_comparison(comparison.folder, results, comparison.budget, comparison.optimum)


def _differences(entry: Entry) -> str:
    """Fields in which a run's config.yaml and its configuration now differ."""
    file = entry.folder / "config.yaml"
    if not file.exists():
        return "its config.yaml is gone"
    before, now = (_leaves(OmegaConf.to_container(layer)) for layer in (OmegaConf.load(file), OmegaConf.create(to_yaml(entry.config))))
    fields = sorted(name for name in before | now if before.get(name, "absent") != now.get(name, "absent"))
    return ", ".join(f"{name} was {before.get(name, 'absent')}, now {now.get(name, 'absent')}" for name in fields) or "config.yaml shows none"


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its dotted name."""
    if not isinstance(value, dict):
        return {prefix[:-1]: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _leaves(inner, f"{prefix}{key}.").items()}
