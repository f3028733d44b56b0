"""The methods by name. One from elsewhere is named by its file and class: `algorithm.name=my_method.py:MyMethod`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rtpo_ray.algorithms.arpo import Arpo
from rtpo_ray.algorithms.base import Algorithm, Objective, Stage
from rtpo_ray.algorithms.dapo import Dapo
from rtpo_ray.algorithms.drgrpo import DrGrpo
from rtpo_ray.algorithms.gigpo import GiGpo
from rtpo_ray.algorithms.grpo import Grpo
from rtpo_ray.algorithms.gspo import Gspo
from rtpo_ray.algorithms.ppo import Ppo
from rtpo_ray.algorithms.refuel import Refuel
from rtpo_ray.algorithms.rloo import Rloo
from rtpo_ray.algorithms.rtpo import Rtpo
from rtpo_ray.algorithms.seeupo import SeeUpo
from rtpo_ray.algorithms.treegrpo import TreeGrpo
from rtpo_ray.options import PLAIN, complaint
from rtpo_ray.plugins import load_class

if TYPE_CHECKING:
    from rtpo_ray.config import AlgorithmConfig

REGISTRY: dict[str, type[Algorithm]] = {
    "rtpo": Rtpo, "seeupo": SeeUpo, "grpo": Grpo, "drgrpo": DrGrpo, "dapo": Dapo, "rloo": Rloo, "gspo": Gspo, "ppo": Ppo,
    "treegrpo": TreeGrpo, "arpo": Arpo, "gigpo": GiGpo, "refuel": Refuel}


def build(config: AlgorithmConfig) -> Algorithm:
    """The method that `config` names, with its options. Raises ValueError for an unknown method or option, or an impossible value."""
    return make(config.name, dict(config.args))


def make(name: str, args: dict[str, Any]) -> Algorithm:
    """The same from a name and options."""
    cls = find(name)
    fields = {spec.name: spec for spec in dataclasses.fields(cls)}
    for key, value in args.items():
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{key} is no option of {name}{meant}; valid: {', '.join(fields)}")
        hint = getattr(fields[key].type, "__name__", str(fields[key].type))
        if hint in PLAIN and type(value) not in PLAIN[hint]:
            raise ValueError(f"{key} is {value!r}; expected {hint}")
        if wrong := complaint(value, fields[key]):
            raise ValueError(f"{key} is {wrong}")
    for key, spec in fields.items():
        if key not in args and spec.default is spec.default_factory is dataclasses.MISSING:
            raise ValueError(f"{key} is missing; {name} has no default for it")
    return cls(**args)


def check(method: Algorithm, max_turns: int) -> None:
    """Whether a method can train at all, before anything starts. Raises ValueError; what its own code raises comes as it is."""
    kind = type(method).__name__
    if type(method).credit is Algorithm.credit:
        raise ValueError(f"{kind} must define credit(group)")
    if not isinstance(method.objective, Objective):
        raise ValueError(f"{kind}.objective is {method.objective!r}; expected an Objective")
    stages = method.stages(max_turns)
    if not isinstance(stages, Sequence) or not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise ValueError(f"{kind}.stages({max_turns}) returned {stages!r}; expected a sequence of at least one Stage")
    for stage in stages:
        if stage.turn is None:
            continue
        if not 0 <= stage.turn < max_turns:
            raise ValueError(f"{kind}.stages({max_turns}) names turn {stage.turn}; expected 0 to {max_turns - 1}")
        if not method.branching:
            raise ValueError(f"{kind}.stages({max_turns}) names turn {stage.turn}, but branching is False, so trunks would keep no boundaries; "
                             "set branching = True")
        if stage.n_siblings < 1 + stage.with_trunk:
            raise ValueError(f"{kind}.stages({max_turns}) asks for {stage.n_siblings} siblings of turn {stage.turn}; expected at least "
                             f"{1 + stage.with_trunk}")


def find(name: str) -> type[Algorithm]:
    """The class of a registered name or of `file.py:Class`. Raises ValueError when there is none."""
    if name in REGISTRY:
        return REGISTRY[name]
    if not name.rpartition(":")[0].endswith(".py"):
        close = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{name!r}; valid choices: {', '.join(REGISTRY)}, or file.py:Class for one of your own{hint}")
    found = load_class(name, Algorithm)
    if "__dataclass_fields__" not in vars(found):  # inherited ones would make its own options plain attributes, silently
        raise ValueError(f"{name!r}: {found.__name__} is no dataclass of its own; put @dataclass(frozen=True, kw_only=True) before it")
    return found
