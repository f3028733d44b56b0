"""Number guessing: find a secret number by being told "higher" or "lower", in fewer guesses than there are numbers.

The best that any policy can do is known (`Guess.optimum`), so a learning curve has a ceiling to be read against. Every turn's answer
follows from what the earlier turns taught. The reward is 1 for the right guess and 0 otherwise.
"""

from __future__ import annotations

import random
import re

from rtpo_ray.environments.base import Environment, Observation, Step

_NUMBER = re.compile(r"[1-9][0-9]*")


class Guess(Environment):
    """Args:
    numbers: the secret is one of 1..numbers, each as likely.
    guesses: that an episode allows; a response that is no number of the range uses one up.
    replay: branch by replaying recorded responses instead of copying the state.
    """

    instant = True

    def __init__(self, numbers: int = 15, guesses: int = 4, replay: bool = False) -> None:
        super().__init__()
        if numbers < 2:
            raise ValueError(f"numbers is {numbers}; expected at least 2")
        if guesses < 1:
            raise ValueError(f"guesses is {guesses}; expected at least 1")
        self.numbers, self.guesses, self.replay = numbers, guesses, replay
        self.secret = 0
        self.taken = 0  # guesses so far
        self.low, self.high = 1, numbers  # what the secret can still be, both included

    @property
    def optimum(self) -> float:
        """Best probability of success: yes/higher/lower answers make a binary tree of depth `guesses`, whose 2**guesses - 1 nodes each find one
        secret."""
        return min(1.0, (2**self.guesses - 1) / self.numbers)

    def check(self, max_turns: int) -> None:
        if max_turns < self.guesses:
            raise ValueError(f"{self.guesses} guesses need {self.guesses} turns, but environment.max_turns is {max_turns}")

    def reset(self, seed: int) -> Observation:
        self.rng = random.Random(seed)
        self.secret, self.taken, self.low, self.high = self.rng.randint(1, self.numbers), 0, 1, self.numbers
        return Observation(f"Find a number from 1 to {self.numbers}.")

    def step(self, response_text: str) -> Step:
        number = self._read(response_text.strip())
        self.taken += 1
        if number == self.secret:
            return Step(reward=1.0, terminated=True)
        info = {"malformed_calls": float(number is None)}
        if self.taken == self.guesses:
            return Step(terminated=True, info=info)
        return Step(observation=Observation(self._narrow(number)), info=info)

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """The lower middle of what is still possible, or with probability `noise` a random number: mostly of the whole range, sometimes
        of what is still possible."""
        if rng.random() >= noise:
            return str((self.low + self.high) // 2)
        (kind,) = rng.choices(("any", "possible"), weights=(3, 1))
        return str(rng.randint(1, self.numbers) if kind == "any" else rng.randint(self.low, self.high))

    def _read(self, text: str) -> int | None:
        """The number of the range that `text` is, if any. Digits are counted first: Python refuses to convert very many."""
        plain = _NUMBER.fullmatch(text) and len(text) <= len(str(self.numbers))
        return int(text) if plain and int(text) <= self.numbers else None

    def _narrow(self, number: int | None) -> str:
        """What a wrong guess is answered, after taking it into account."""
        if number is None:
            return f"not a number from 1 to {self.numbers}"
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return "higher"
        self.high = min(self.high, number - 1)
        return "lower"
