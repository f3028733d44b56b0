"""What a machine costs and what there is to do on it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omegaconf import OmegaConf

from rtpo_ray.config import read_yaml
from rtpo_ray.errors import ConfigError
from rtpo_ray.options import PLAIN, complaint, opt


class Turn(NamedTuple):
    """One turn of a recorded or drawn episode."""

    context: int  # tokens
    response: int  # tokens, at least 1
    seconds: float = 0.0  # that the environment takes after the response, without any of our cores


Episode = tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds are those of one process that has its cores, or its GPU, to itself."""

    slots: int = opt(256, "responses that an engine samples at once", least=1)
    step: float = opt(5e-3, "seconds of an engine's step, however many responses run", least=0)
    sequence: float = opt(1e-4, "seconds of a step for each response that runs", least=0)
    prefill: float = opt(1e-5, "seconds a prompt token that is not cached", least=0)
    turn: float = opt(0.0, "seconds of the generator's process for each turn of an episode, in which its engine waits", least=0)
    cache_block: int = opt(16, "tokens of a block of the prefix cache", least=1)
    generator_threads: int = opt(1, "cores that a generator keeps busy", least=1)
    learner_threads: int = opt(1, "cores that a learner rank keeps busy", least=1)
    cores: int = opt(0, "cores that all processes share; 0: each has what it needs", least=0)
    crowding: float = opt(1.0, "seconds of a thread when every core is busy against those when it is alone, such as 1.6 for two threads of one "
                          "physical core", least=1)
    learner_token: float = opt(1e-4, "c: seconds of one learner rank a position of forward and backward passes", least=0)
    learner_scaling: float = opt(1.0, "e: M ranks take c / M^e a position", above=0, most=1)
    least_ranks: int = opt(1, "learner ranks that the model needs", least=1)
    update: float = opt(0.0, "seconds of an update beside its passes", least=0)
    push: float = opt(0.0, "seconds of a push beside its bytes", least=0)
    push_receiver: float = opt(0.0, "seconds of a push for each generator", least=0)
    weight_bytes: float = opt(0.0, "bytes of a push", least=0)
    bucket_bytes: float = opt(64 * 2**20, "bytes that are sent at once", above=0)
    bandwidth: float = opt(1e9, "bytes a second from one process to the next", above=0)
    chunk: int = opt(8, "groups that are handed to the learner together, when it takes them as they are complete", least=1)
    ordered: bool = opt(True, "such chunks are handed on in the order of the trunks, not as they are complete")
    stage: float = opt(0.0, "seconds of a stage that are none of the others", least=0)
    block: float = opt(0.0, "seconds of the coordinator for each block of rollouts, one after the other", least=0)
    rollout: float = opt(0.0, "seconds of the pipeline for each rollout of a stage that samples none, such as GRPO's", least=0)
    sweep: float = opt(0.0, "seconds of a sweep that are of none of its stages", least=0)

    def slowdown(self, threads: int) -> float:
        """By how much processes with so many busy threads in all are slowed down: the cores are shared evenly, and the more of them are busy, the
        slower is each."""
        if not self.cores or threads <= 1:
            return 1.0
        busy = (min(threads, self.cores) - 1) / max(self.cores - 1, 1)
        return max(1.0, threads / self.cores) * (1 + (self.crowding - 1) * busy)

    def push_seconds(self, generators: int) -> float:
        """A broadcast in buckets along a binary tree: each further level waits for one bucket more."""
        levels = math.ceil(math.log2(generators + 1))
        sent = self.weight_bytes + (levels - 1) * min(self.bucket_bytes, self.weight_bytes)
        return self.push + self.push_receiver * generators + sent / self.bandwidth


@dataclass(frozen=True, slots=True)
class Returns:
    """Returns of 0 or 1 of the siblings of a boundary: boundaries differ in their probability of success, by a Beta distribution.

    mean: of that probability. spread: alpha + beta; the less, the more boundaries are all success or all failure.
    """

    mean: float
    spread: float

    def equal(self, n: int) -> float:
        """Probability that n siblings all return the same: E[p^n + (1 - p)^n] = (B(a + n, b) + B(a, b + n)) / B(a, b)."""
        if not 0 < self.mean < 1:
            return 1.0
        a, b = self.mean * self.spread, (1 - self.mean) * self.spread
        return sum(math.exp(math.lgamma(x + n) - math.lgamma(x) - math.lgamma(a + b + n) + math.lgamma(a + b)) for x in (a, b))

    @staticmethod
    def of(mean: float, equal: float, n: int) -> Returns:
        """Those with this mean and this share of groups of `n` whose returns are equal, or as near to it as there are any."""
        low, high = -6.0, 9.0  # of log10(spread); `equal` falls with it
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if Returns(mean, 10**middle).equal(n) > equal else (low, middle)
        return Returns(mean, 10**low)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a sweep has to do, whatever the method.

    episodes: from which trunks and siblings are taken, evenly over all of their lengths.
    returns: of siblings of turn k, [K].
    padding: positions that the learner computes for each that holds a token of a sample.
    shared: the learner computes what samples of a group have in common once.
    """

    tasks: int
    turns: int  # K
    episodes: tuple[Episode, ...]
    returns: tuple[Returns, ...]
    padding: float = 1.0
    shared: bool = False

    def take(self, count: int, turn: int, rng: random.Random) -> list[Episode]:
        """`count` episodes that have turn `turn`, evenly over their lengths from there on, in random order."""
        able = sorted((e for e in self.episodes if len(e) > turn), key=lambda e: sum(t.response for t in e[turn:]))
        taken = [able[int((number + 0.5) * len(able) / count)] for number in range(count)] if able else []
        rng.shuffle(taken)
        return taken


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A workload as a file describes it: episodes are drawn from it."""

    tasks: int = opt(64, "tasks of a sweep", least=1)
    turns: int = opt(3, "K: turns an episode may take", least=1)
    go_on: float = opt(0.8, "probability that an episode goes on after a turn", least=0, most=1)
    prompt_tokens: int = opt(512, "tokens of the first context", least=1)
    response_tokens: float = opt(512.0, "mean tokens of a response", least=1)
    response_spread: float = opt(0.5, "standard deviation of a response's tokens divided by their mean (log-normal)", least=0)
    max_response_tokens: int = opt(4096, "longest response", least=1)
    observation_tokens: int = opt(128, "tokens that a turn adds to the context beside its response", least=0)
    environment_seconds: float = opt(0.0, "seconds of the environment after a response, exponentially distributed", least=0)
    success: float = opt(0.3, "share of siblings that succeed", least=0, most=1)
    equal: float = opt(0.5, "share of groups of 8 whose returns are all equal", least=0, most=1)
    padding: float = opt(1.1, "positions that the learner computes for each that holds a token of a sample", least=1)
    shared: bool = opt(False, "the learner computes what samples of a group have in common once")

    def work(self, seed: int, episodes: int = 2048) -> Work:
        rng = random.Random(seed)
        made = tuple(self._episode(rng) for _ in range(episodes))
        returns = Returns.of(self.success, self.equal, 8)
        return Work(tasks=self.tasks, turns=self.turns, episodes=made, returns=(returns,) * self.turns, padding=self.padding, shared=self.shared)

    def _episode(self, rng: random.Random) -> Episode:
        sigma = math.sqrt(math.log1p(self.response_spread**2))
        mu, context, made = math.log(self.response_tokens) - sigma**2 / 2, self.prompt_tokens, []
        while True:
            response = min(self.max_response_tokens, max(1, round(rng.lognormvariate(mu, sigma))))
            seconds = rng.expovariate(1 / self.environment_seconds) if self.environment_seconds else 0.0
            made.append(Turn(context, response, seconds))
            if len(made) == self.turns or rng.random() > self.go_on:
                return tuple(made)
            context += response + self.observation_tokens


T = TypeVar("T", Machine, Drawn)


def load_machine(path: Path) -> tuple[Machine, Drawn]:
    """Sections `machine` and `work` of a YAML file. Raises ConfigError."""
    content = OmegaConf.to_container(read_yaml(path), resolve=True)
    assert isinstance(content, dict)
    if unknown := set(content) - {"machine", "work"}:
        raise ConfigError(f"{path}: unknown section {', '.join(map(str, sorted(unknown)))}; valid here: machine, work")
    return _section(Machine, content.get("machine") or {}, f"{path}: machine"), _section(Drawn, content.get("work") or {}, f"{path}: work")


def _section(kind: type[T], values: Mapping[Any, Any], where: str) -> T:
    """A dataclass from what a file says, checked."""
    specs = {spec.name: spec for spec in dataclasses.fields(kind)}
    for name, value in values.items():
        if name not in specs:
            raise ConfigError(f"{where}: unknown field {name}; valid here: {', '.join(specs)}")
        if not isinstance(value, PLAIN[str(specs[name].type)]):
            raise ConfigError(f"{where}: field {name} is {value!r}; expected {specs[name].type}")
        if wrong := complaint(value, specs[name]):
            raise ConfigError(f"{where}: field {name} is {wrong}")
    return kind(**values)
