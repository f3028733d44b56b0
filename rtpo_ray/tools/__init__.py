"""The toolsets by name. One from elsewhere is named by its file and class: `my_tools.py:MyTools`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from rtpo_ray.options import misfit
from rtpo_ray.plugins import load_class
from rtpo_ray.tools.base import ToolError, Toolset, tool

__all__ = ["TOOLSETS", "ToolError", "Toolset", "build", "find", "tool"]

TOOLSETS: dict[str, str] = {  # name -> module and class, imported when it is asked for: some load much
    "python": "rtpo_ray.tools.python:Python",
    "calculator": "rtpo_ray.tools.calculator:Calculator",
    "search": "rtpo_ray.tools.search:Search",
    "mcp": "rtpo_ray.tools.mcp:Mcp",
}


def build(spec: str | Mapping[str, Any]) -> Toolset:
    """A fresh toolset: `spec` is its name, or one key, the name, with its options, such as {"search": {"corpus": "docs.jsonl", "top": 3}}.

    Raises ValueError, naming what is valid, when name or options are unknown or impossible, and FileNotFoundError for a file that is not there,
    which may be on another machine.
    """
    name, options = _parts(spec)
    found: Any = find(name)
    known = {option: parameter for option, parameter in inspect.signature(found).parameters.items()
             if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"toolset {name}: unknown option {option!r}; valid options: {', '.join(known) or 'none'}")
        if wanted := misfit(known[option], value):
            raise ValueError(f"toolset {name}: {option} is {value!r}; expected {wanted}")
    if missing := [option for option, parameter in known.items() if parameter.default is parameter.empty and option not in options]:
        raise ValueError(f"toolset {name}: it needs {', '.join(missing)}, as in {{{name}: {{{missing[0]}: ...}}}}")
    try:
        toolset: Toolset = found(**options)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"toolset {name}: {error}") from error
    return toolset


def find(name: str) -> type[Toolset]:
    """The class that `name` stands for. Raises ValueError when there is none."""
    if ".py:" in name:
        return load_class(name, Toolset)
    if name not in TOOLSETS:
        raise ValueError(f"unknown toolset {name!r}; valid toolsets: {', '.join(TOOLSETS)}, or file.py:Class")
    module, _, attribute = TOOLSETS[name].partition(":")
    found: type[Toolset] = getattr(importlib.import_module(module), attribute)
    return found


def _parts(spec: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(f"toolset {spec!r}; expected a name, or one name with its options, as in {{search: {{corpus: docs.jsonl}}}}")
    ((name, options),) = spec.items()
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"toolset {name}: options are {options!r}; expected a mapping")
    return str(name), {str(option): value for option, value in (options or {}).items()}
