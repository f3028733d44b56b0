"""Fields with documentation and cheap checks, for the configuration and for the options of methods and environments."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}  # annotation -> types of a value


def opt(default: Any, doc: str, *, choices: Sequence[str] = (), least: float | None = None, above: float | None = None,
        most: float | None = None, why: str = "") -> Any:
    """A field with its documentation and the cheap checks (choices, least <= value <= most, above < value); `why` there is a least."""
    return field(default=default, metadata={"doc": doc, "choices": tuple(choices), "least": least, "above": above, "most": most, "why": why})


def misfit(parameter: inspect.Parameter, value: Any) -> str:
    """What plain type a constructor's parameter wants, when `value` has another; empty when it fits or cannot be told."""
    expected = PLAIN.get(str(parameter.annotation))
    wrong = expected is not None and (not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected))
    return str(parameter.annotation) if wrong else ""


def complaint(value: Any, spec: dataclasses.Field[Any]) -> str:
    """What is wrong with `value` for the field `spec`, as the end of "field NAME is "; empty when nothing is."""
    meta = spec.metadata
    if meta.get("choices") and value not in meta["choices"]:
        return f"{value!r}; valid choices: {', '.join(meta['choices'])}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}; expected a finite number"
    if meta.get("least") is not None and value < meta["least"]:
        return f"{value}; expected at least {meta['least']}" + (f" ({meta['why']})" if meta.get("why") else "")
    if meta.get("most") is not None and value > meta["most"]:
        return f"{value}; expected at most {meta['most']}"
    if meta.get("above") is not None and value <= meta["above"]:
        return f"{value}; expected more than {meta['above']}"
    return ""
