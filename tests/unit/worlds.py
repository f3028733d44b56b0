"""Small environments, and an engine that plays them, for tests of episodes, generators and pipelines."""

import asyncio
import random
import re
import time

from chats import chat

from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import Environment, Observation, Step
from rtpo_ray.episodes.episode import Episode, EpisodeSettings
from rtpo_ray.types import Task

WORDS = ("red", "blue", "green", "black")


class Parrot(Environment):
    """Says a random word a turn; the reward is 1 at the end when every response repeated its word."""

    instant = True

    def __init__(self, turns=3, role="tool"):
        super().__init__()
        self.turns, self.role, self.taken, self.right, self.word = turns, role, 0, True, ""

    def reset(self, seed):
        self.rng = random.Random(seed)
        self.taken, self.right, self.word = 0, True, self.rng.choice(WORDS)
        return Observation(f"say {self.word}!")

    def step(self, response_text):
        self.right, self.taken, self.word = self.right and response_text == self.word, self.taken + 1, self.rng.choice(WORDS)
        if self.taken == self.turns:
            return Step(reward=float(self.right), terminated=True)
        return Step(observation=Observation(f"say {self.word}!", self.role), info={"tool_calls": 1, "malformed_calls": 0})


class ReplayedParrot(Parrot):
    replay = True


class Drifting(ReplayedParrot):
    """Not deterministic under its seed, so it cannot be replayed."""

    def reset(self, seed):
        return super().reset(random.SystemRandom().randrange(2**31))


class Slow(Parrot):
    instant = False
    seconds = 0.3

    def step(self, response_text):
        time.sleep(self.seconds)
        return super().step(response_text)


def settings(**changes):
    return EpisodeSettings(**{"max_turns": 4, "context": "append", "max_response_tokens": 8, "max_model_len": 500, "step_timeout": 5.0, **changes})


def episode(environment=Parrot, family="chatml", seed=1, **changes):
    """A started episode of task t-`seed`."""
    made = Episode(environment, chat(family), settings(**changes))
    made.reset(Task(task_id=f"t-{seed}", seed=seed))
    return made


def run(made, engine, seed=11, **options):
    arguments = {"rollout_id": "t/0", "task_id": "t", "temperature": 1.0, **options}
    return asyncio.run(made.run(engine, seed=seed, **arguments))


def parrot_engine(family="chatml", wrong=lambda seed: False, **options):
    """Repeats the last word of its context, or says "x" where `wrong(sampling seed)`."""
    template = chat(family)

    def reply(context, sampling):
        word = re.findall(r"say (\w+)!", template.tokenizer.decode(context))[-1]
        return [*template.encode("x" if wrong(sampling.seed) else word), template.tokenizer.eos_token_id]

    return ScriptedEngine(reply, **options)
