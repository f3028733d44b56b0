"""The environments by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtpo_ray.environments.base import Environment
from rtpo_ray.environments.guess import Guess
from rtpo_ray.environments.lookup import Lookup

if TYPE_CHECKING:
    from rtpo_ray.config import EnvironmentConfig

REGISTRY: dict[str, type[Environment]] = {"lookup": Lookup, "guess": Guess}


def build(config: EnvironmentConfig) -> Environment:
    """A fresh environment with the arguments of the config."""
    return REGISTRY[config.name](**config.args)
