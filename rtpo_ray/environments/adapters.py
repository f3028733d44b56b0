"""Environments of other projects, each one class: GEM's, TextArena's games for one player, and Reasoning Gym's generated questions."""

from __future__ import annotations

import functools
import json
import logging
import pickle
from collections.abc import Mapping
from typing import Any

from rtpo_ray.environments.base import Environment, Observation, Step
from rtpo_ray.environments.foreign import GlobalRandom, optional, state_hash
from rtpo_ray.errors import GraderError

_AGAIN = "That is not right. Try again."


class Gem(Environment):
    """A text environment of GEM. The response is the action, whole; rewards are GEM's, of every step.

    Args:
        name: that GEM knows the environment by.
        options: arguments that override those of the name.
        replay: branch by replaying recorded responses; None: only where the environment cannot be pickled.
    """

    def __init__(self, name: str = "game:GuessTheNumber-v0-easy", options: Mapping[str, Any] | None = None, replay: bool | None = None) -> None:
        super().__init__()
        self.name, self.options = name, dict(options or {})
        self.world: Any = None
        self.chance = GlobalRandom(0)
        self.replay = not _pickles(name, json.dumps(self.options, sort_keys=True)) if replay is None else replay

    def check(self, max_turns: int) -> None:
        self.reset(0)

    def reset(self, seed: int) -> Observation:
        """Raises ValueError when GEM does not know the name."""
        self.chance = GlobalRandom(seed)
        with self.chance.installed():
            self.world = _gem().make(self.name, **self.options)
            text, info = self.world.reset(seed=seed % 2**32)
        return Observation(_told(text, info))

    def step(self, response_text: str) -> Step:
        with self.chance.installed():
            text, reward, terminated, truncated, info = self.world.step(response_text)
        observation = None if terminated or truncated else Observation(_told(text, info))
        return Step(observation=observation, reward=float(reward), terminated=bool(terminated), truncated=bool(truncated))

    def state_hash(self) -> str:
        return state_hash((self.world, self.chance))


class TextArena(Environment):
    """A game of TextArena for one player. The response is the move, whole; what the game says since the last one is the observation, without
    TextArena's wrappers, which would repeat the conversation. The reward is the game's, at the end.

    Args:
        game: that TextArena knows it by, such as GuessTheNumber-v0.
        options: arguments that override those of the name.
        replay: branch by replaying recorded responses instead of copying the state.
    """

    def __init__(self, game: str = "GuessTheNumber-v0", options: Mapping[str, Any] | None = None, replay: bool = False) -> None:
        super().__init__()
        self.game, self.options, self.replay = game, dict(options or {}), replay
        self.world: Any = None
        self.chance = GlobalRandom(0)
        optional("textarena", "'rtpo-ray[textarena]'")

    def check(self, max_turns: int) -> None:
        try:
            self.reset(0)
        except AssertionError as error:  # how TextArena refuses a number of players
            raise ValueError(f"game is {self.game!r}; expected one for a single player: {error}") from error

    def reset(self, seed: int) -> Observation:
        """Raises ValueError when TextArena does not know the game."""
        arena = optional("textarena", "'rtpo-ray[textarena]'")
        self.chance = GlobalRandom(seed)
        with self.chance.installed():
            self.world = arena.make(self.game, **self.options)
            while isinstance(self.world, arena.Wrapper):
                self.world = self.world.env
            self.world.reset(num_players=1, seed=seed)
            return self._news()

    def step(self, response_text: str) -> Step:
        with self.chance.installed():
            done, _ = self.world.step(response_text)
            if not done:
                return Step(observation=self._news())
            rewards, _ = self.world.close()
        return Step(reward=float(rewards[0]), terminated=True)

    def state_hash(self) -> str:
        return state_hash((self.world, self.chance))

    def _news(self) -> Observation:
        _, messages = self.world.get_observation()
        return Observation("\n".join(text for _, text, kind in messages if kind.name != "PLAYER_ACTION"))


class ReasoningGym(Environment):
    """A question that Reasoning Gym generates from the seed, scored by its own scorer. The answer is what stands in <answer></answer>, or else the
    whole response.

    Args:
        dataset: that Reasoning Gym knows it by, such as chain_sum.
        options: of the dataset's configuration.
        tries: responses that an episode allows; the reward is the last one's score.
    """

    system = "Think as long as you like, then give the final answer between <answer> and </answer>."

    def __init__(self, dataset: str = "chain_sum", options: Mapping[str, Any] | None = None, tries: int = 1) -> None:
        super().__init__()
        if tries < 1:
            raise ValueError(f"tries is {tries}; expected at least 1")
        self.dataset, self.options, self.tries = dataset, dict(options or {}), tries
        self.seed, self.tried = 0, 0
        self.scorer: Any = None  # the dataset of the one question
        self.item: dict[str, Any] = {}
        optional("reasoning_gym", "'rtpo-ray[reasoning-gym]'")

    def check(self, max_turns: int) -> None:
        if max_turns < self.tries:
            raise ValueError(f"{self.tries} tries need {self.tries} turns, but environment.max_turns is {max_turns}")
        self.reset(0)

    def reset(self, seed: int) -> Observation:
        """Raises ValueError when Reasoning Gym does not know the dataset."""
        self.seed, self.tried = seed, 0
        self._generate()
        return Observation(self.item["question"])

    def step(self, response_text: str) -> Step:
        """Raises GraderError when the scorer fails, or gives no number from 0 to 1: the answer then is neither right nor wrong."""
        found = optional("reasoning_gym.utils", "'rtpo-ray[reasoning-gym]'").extract_answer(response_text)
        answer = response_text.strip() if found is None else found
        self.tried += 1
        try:
            score = float(self.scorer.score_answer(answer=answer, entry=self.item))
        except Exception as error:  # each dataset brings a scorer of its own
            raise GraderError(f"the scorer of {self.dataset!r} failed on seed {self.seed}, answer {answer[:200]!r}: "
                              f"{type(error).__name__}: {error}") from error
        if not 0 <= score <= 1:
            raise GraderError(f"the scorer of {self.dataset!r} gave {score} on seed {self.seed}, answer {answer[:200]!r}; expected 0 to 1")
        if score < 1 and self.tried < self.tries:
            return Step(observation=Observation(_AGAIN))
        return Step(reward=score, terminated=True)

    def snapshot(self) -> Any:
        return self.seed, self.tried

    def restore(self, snapshot: Any) -> None:
        self.seed, self.tried = snapshot
        self._generate()

    def state_hash(self) -> str:
        return state_hash((self.seed, self.tried, self.item["question"], self.item["answer"]))

    def _generate(self) -> None:
        gym = optional("reasoning_gym", "'rtpo-ray[reasoning-gym]'")
        with GlobalRandom(self.seed).installed():  # some datasets draw from it
            self.scorer = gym.create_dataset(self.dataset, **{**self.options, "seed": self.seed, "size": 1})
            self.item = self.scorer[0]


def _gem() -> Any:
    """The package, which sets up logging for the whole process when it is imported: that is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return optional("gem", "--no-deps gem-llm")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _told(text: str, info: Mapping[str, Any]) -> str:
    """GEM puts what the next action is to be chosen by, such as the board, apart."""
    return "\n".join(part for part in (info.get("prefix"), text, info.get("suffix")) if part)


@functools.cache
def _pickles(name: str, options: str) -> bool:
    """Whether an environment of GEM can be pickled, tried once a process."""
    with GlobalRandom(0).installed():
        world = _gem().make(name, **json.loads(options))
        world.reset(seed=0)
    try:
        pickle.loads(pickle.dumps(world))
    except Exception:  # noqa: BLE001 - whatever an object raises that cannot be pickled
        return False
    return True
