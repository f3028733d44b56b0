"""Generator actors without vLLM, and environments that misbehave on purpose, for tests of collection and publishing."""

import os
import time
from pathlib import Path

import ray
from chats import chat
from worlds import Parrot, parrot_engine, settings

from actors.generator import Generator
from actors.pool import GeneratorPool, PoolLimits
from actors.publisher import AsLoaded
from rtpo_ray.engines.scripted import ScriptedEngine


class Ragged(Parrot):
    """1 to 3 turns, by the task's seed; so blocks have uneven numbers of boundaries, and some have none."""

    def reset(self, seed):
        self.turns = seed % 3 + 1
        return super().reset(seed)


class Marked(Ragged):
    """Does something nasty when the task of seed 5 takes its first step; `folder` remembers what was done, across processes."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seed = folder, -1

    def reset(self, seed):
        self.seed = seed
        return super().reset(seed)

    def first_time(self):
        try:
            Path(self.folder, "done").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def step(self, response_text):
        if self.seed == 5:
            self.nasty()
        return super().step(response_text)

    def nasty(self):
        raise NotImplementedError


class RaisesOnce(Marked):
    def nasty(self):
        if self.first_time():
            raise ValueError("a door is stuck")


class RaisesAlways(Marked):
    def nasty(self):
        raise ValueError("a door is stuck")


class KillsOnce(Marked):
    def nasty(self):
        if self.first_time():
            os._exit(1)


class KillsAlways(Marked):
    def nasty(self):
        os._exit(1)


class Gated(Marked):
    """The task of seed 5 waits for the file `open`."""

    instant = False

    def nasty(self):
        until = time.monotonic() + 60
        while not Path(self.folder, "open").exists():
            if time.monotonic() > until:
                raise TimeoutError("waited 60 s for the gate to open")
            time.sleep(0.02)


class Shut(Gated):
    """Every task waits for it."""

    def step(self, response_text):
        self.nasty()
        return Ragged.step(self, response_text)


class Player(Generator):
    """A generator that repeats words; wrong at every third seed, so groups are unequal."""

    def __init__(self, name, world, overlong="error", **changes):
        super().__init__(name=name, make_engine=lambda: parrot_engine(wrong=lambda seed: seed % 3 == 0), make_environment=world,
                         template=chat("chatml"), settings=settings(step_timeout=90.0, **changes), overlong=overlong, concurrency=100)


class Unborn(Player):
    """Does not come up."""

    def __init__(self, *args, **options):
        raise RuntimeError("no room on this machine")


class Spawn:
    """Makes actors of `kind(name, *args, **options)`; the n-th one has the class `kinds[n]`, later ones the last."""

    def __init__(self, kinds, *args, **options):
        self.kinds, self.args, self.options = kinds, args, options

    def __call__(self, name):
        kind = self.kinds[min(int(name.rsplit("-", 1)[1]), len(self.kinds) - 1)]
        return ray.remote(kind).options(name=name, num_cpus=0, max_restarts=0, max_concurrency=1000).remote(name, *self.args, **self.options)


def open_pool(spawn, count, most=0, each=1000):
    """A pool actor whose generators are up and serve version 0."""
    limits = PoolLimits(least=count, most=most or count, each=each, start_timeout=60.0)
    pool = ray.remote(GeneratorPool).options(name="rtpo-generator-pool", num_cpus=0, max_concurrency=1000).remote(spawn, limits)
    ray.get(pool.fill.remote(0, count), timeout=90)
    assert len(AsLoaded(pool).publish(0).members) == count
    return pool


def status(pool):
    return ray.get(pool.status.remote(), timeout=30)


class ModelEngine(ScriptedEngine):
    """Says fixed words, with the log-probabilities of the weights that it really holds."""

    def __init__(self, path):
        from tests.integration.tiny import load_tiny_qwen3, score

        self.model = load_tiny_qwen3(path)
        super().__init__(lambda context, sampling: (5, 6, 7, 8), logprobs=lambda context, response: score(self.model, context, response))

    def load_weights(self, tensors, version):
        super().load_weights(self.taken(tensors), version)

    def taken(self, tensors):
        """The tensors as they come, each put in place."""
        own = self.model.state_dict()
        for name, tensor in tensors:
            own[name].copy_(tensor)
            yield name, tensor


class Stale(ModelEngine):
    """Takes the bytes, reports success and keeps its weights."""

    def taken(self, tensors):
        yield from tensors


class Dying(ModelEngine):
    """Ends its process after the first tensor."""

    def taken(self, tensors):
        for _ in tensors:
            os._exit(1)
            yield


class Holder(Generator):
    """A generator on a ModelEngine."""

    engine = ModelEngine

    def __init__(self, name, path):
        super().__init__(name=name, make_engine=lambda: self.engine(path), make_environment=Parrot, template=chat("chatml"), settings=settings(),
                         overlong="error", concurrency=100)

    def process(self):
        return os.getpid()


class StaleHolder(Holder):
    engine = Stale


class DyingHolder(Holder):
    engine = Dying
