"""The graders by name: what an answer is worth. One from elsewhere is named by its file and class: `my_grader.py:MyGrader`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rtpo_ray.options import misfit
from rtpo_ray.plugins import load_class
from rtpo_ray.rewards.base import Grader
from rtpo_ray.rewards.judge import Judge
from rtpo_ray.rewards.math import Math
from rtpo_ray.rewards.text import F1, Exact, Hit

GRADERS: dict[str, type[Grader]] = {"math": Math, "exact": Exact, "f1": F1, "hit": Hit, "judge": Judge}


def build(spec: str | Mapping[str, Any]) -> Grader:
    """The grader that `spec` asks for: a name, or a mapping of one name to its options, such as {"math": {"gold": "final"}}.

    Raises ValueError for an unknown name or option, and for a value that the grader refuses.
    """
    if isinstance(spec, Mapping) and len(spec) != 1:
        raise ValueError(f"grader is {dict(spec)!r}; expected a name, or a mapping of one name to its options")
    name, options = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ValueError(f"options of the grader {name!r} are {options!r}; expected a mapping")
    kind = load_class(name, Grader) if ".py:" in name else GRADERS.get(name)
    if kind is None:
        raise ValueError(f"grader is {name!r}; valid names: {', '.join(GRADERS)}, or file.py:Class")
    parameters = inspect.signature(kind).parameters
    if unknown := [option for option in options if option not in parameters]:
        raise ValueError(f"the grader {name!r} has no option {unknown[0]!r}; valid options: {', '.join(parameters)}")
    if missing := [key for key, parameter in parameters.items() if parameter.default is parameter.empty and key not in options]:
        raise ValueError(f"the grader {name!r} needs the option {missing[0]!r}; valid options: {', '.join(parameters)}")
    for key, value in options.items():
        if wanted := misfit(parameters[key], value):
            raise ValueError(f"the grader {name!r}: {key} is {value!r}; expected {wanted}")
    return kind(**options)
