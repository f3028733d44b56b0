"""Look-ups that end after one response, so that a trainer of single turns can be given the same task."""

from __future__ import annotations

import zlib
from dataclasses import replace

from rtpo_ray.environments.base import Observation, Step
from rtpo_ray.environments.lookup import Lookup


class OneCall(Lookup):
    """The first response is the episode: 1 for the look-up that was asked for, 0 otherwise.

    Args:
    coin: the reward is a coin that the text decides, so that groups differ whatever a model says; for measurements of speed only.
    rules: lines of a manual that come before every question, as the instructions of real agents do; some 55 tokens each for the tiny model.
    entities, relations: as Lookup's.
    """

    def __init__(self, entities: int = 26, relations: int = 4, coin: bool = False, rules: int = 0) -> None:
        super().__init__(1, entities, relations)
        self.coin, self.rules = coin, rules

    def reset(self, seed: int) -> Observation:
        """The question, after the manual."""
        first = super().reset(seed)
        manual = "".join(f"Rule {number}: ask for one relation at a time, and wait for what the tool says.\n" for number in range(self.rules))
        return replace(first, text=manual + first.text)

    def check(self, max_turns: int) -> None:
        """One turn is enough."""

    def step(self, response_text: str) -> Step:
        if self.coin:
            return Step(reward=float(zlib.crc32(response_text.encode()) % 2), terminated=True)
        step = super().step(response_text)
        return Step(reward=float(self.seen == [self.gold]), terminated=True, info=step.info)
