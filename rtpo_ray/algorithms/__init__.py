"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rtpo_ray.algorithms.base import Algorithm
from rtpo_ray.algorithms.rtpo import Rtpo

if TYPE_CHECKING:
    from rtpo_ray.config import AlgorithmConfig

REGISTRY: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"rtpo": Rtpo}


def build(config: AlgorithmConfig) -> Algorithm:
    """The method that `config.name` asks for."""
    return REGISTRY[config.name](config)
