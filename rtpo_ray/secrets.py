"""Secrets: a configuration names the environment variable that holds one, `env:NAME`. Its value is read where it is used and goes nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

PREFIX = "env:"
SHORTEST = 4  # letters of a secret: what is shorter is in every text by chance


def reveal(value: Any) -> Any:
    """`value` with every `env:NAME` in it, however deep, replaced by what the variable holds. Raises ValueError when one is not set."""
    if isinstance(value, dict):
        return {key: reveal(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(reveal(inner) for inner in value)
    for name in named(value):
        if name not in os.environ:
            raise ValueError(f"{PREFIX}{name}: the environment variable {name} is not set; it must be in the environment of every process that "
                             "uses it, so on a cluster in that of its nodes")
        return os.environ[name]
    return value


def conceal(text: str, value: Any) -> str:
    """`text` without what the variables hold that `value` names: an error's message may repeat what it was given."""
    for name in named(value):
        if len(secret := os.environ.get(name, "")) >= SHORTEST:
            text = text.replace(secret, f"{PREFIX}{name}")
    return text


def named(value: Any) -> Iterator[str]:
    """The variables that `value` names."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from named(inner)
    elif isinstance(value, str) and value.startswith(PREFIX) and value[len(PREFIX):].isidentifier():
        yield value[len(PREFIX):]
