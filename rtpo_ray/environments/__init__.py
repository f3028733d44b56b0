"""The environments by name. One of your own is named by its file and class: `environment.path=my_env.py:MyEnv`.

Those that need an optional package import it when they are made, and say then what is to be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtpo_ray.environments.adapters import Gem, ReasoningGym, TextArena
from rtpo_ray.environments.appworld import AppWorld
from rtpo_ray.environments.base import Environment
from rtpo_ray.environments.bfcl import BFCL
from rtpo_ray.environments.guess import Guess
from rtpo_ray.environments.lookup import Lookup
from rtpo_ray.environments.question import Question
from rtpo_ray.plugins import load_class
from rtpo_ray.secrets import reveal

if TYPE_CHECKING:
    from rtpo_ray.config import EnvironmentConfig

REGISTRY: dict[str, type[Environment]] = {
    "lookup": Lookup, "guess": Guess, "question": Question, "bfcl": BFCL, "appworld": AppWorld, "gem": Gem, "textarena": TextArena,
    "reasoning-gym": ReasoningGym}


def build(config: EnvironmentConfig) -> Environment:
    """A fresh environment with the arguments of the config, secrets revealed."""
    return find(config)(**reveal(dict(config.args)))


def find(config: EnvironmentConfig) -> type[Environment]:
    """The class that `config` names. Raises ValueError when environment.path names none."""
    return load_class(config.path, Environment) if config.path else REGISTRY[config.name]
