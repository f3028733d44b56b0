"""Random and hand-made records, for tests of rows, credit and counts."""

import random
import struct
from dataclasses import replace

from pipelines.credit import credit_groups
from pipelines.rows import groups_to_table
from rtpo_ray import algorithms
from rtpo_ray.config import AlgorithmConfig
from rtpo_ray.types import Boundary, Group, Rollout, TurnRecord, context_hash

RTPO = algorithms.build(AlgorithmConfig())


def turn_record(turn=0, context=(1, 2), response=(3, 4), reward=0.0, **changes):
    fields = {
        "turn": turn, "context_ids": tuple(context), "context_hash": context_hash(context), "response_ids": tuple(response),
        "engine_logprobs": (-0.5,) * len(response), "weight_version": 0, "seed": 1, "temperature": 1.0, "finish_reason": "stop",
        "observation": "", "reward": reward, "state_hash": "s"}
    return TurnRecord(**{**fields, **changes})


def sibling(name, *rewards, end="terminated", failure="", turn=0, parent="t/0"):
    """A rollout from `turn` on with these rewards; without any, one that has no turns. Without a parent it is a trunk."""
    turns = tuple(turn_record(turn + i, context=range(1, 4 + i), reward=reward) for i, reward in enumerate(rewards))
    return Rollout(rollout_id=name, task_id="t", turns=turns, end=end, failure=failure, parent=parent)


def trunk(name, *rewards, boundaries=None, **changes):
    """A trunk with one boundary a turn, or with `boundaries`: (turn, context hash, state hash) each."""
    made = sibling(name, *rewards, parent="", **changes)
    places = [(turn.turn, turn.context_hash, turn.state_hash) for turn in made.turns] if boundaries is None else boundaries
    kept = tuple(Boundary(turn=turn, context_hash=context, state_hash=state, snapshot=bytes([turn])) for turn, context, state in places)
    return replace(made, boundaries=kept)


def failed(name, failure="EngineError: lost"):
    return sibling(name, end="failed", failure=failure)


def group(*siblings, name="t/0/0", turn=0):
    return Group(group_id=name, task_id="t", turn=turn, siblings=siblings)


def random_text(rng):
    return "".join(rng.choice("ab \n\"\\\u00e9\u4e2d\U0001f600\x00") for _ in range(rng.randint(0, 12)))


def random_rollout(rng, name, boundaries=True):
    turns = []
    for k in range(rng.randint(0, 4)):
        context, response = ([rng.randrange(2**31) for _ in range(rng.randint(1, 20))] for _ in range(2))
        logprobs = tuple(struct.unpack("f", struct.pack("f", -rng.expovariate(1)))[0] for _ in response)  # engines report float32
        turns.append(turn_record(
            k, context, response, reward=rng.uniform(-1, 1), engine_logprobs=logprobs, weight_version=rng.randrange(2**40), seed=rng.randrange(2**31),
            temperature=rng.random(), finish_reason=rng.choice(("stop", "length")), observation=random_text(rng), state_hash=random_text(rng),
            tool_calls=rng.randrange(3), malformed_calls=rng.randrange(3), failed_calls=rng.randrange(3), cached_prompt_tokens=rng.randrange(20),
            kind=rng.choice(("action", "summary")), train_context_ids=tuple(rng.randrange(2**31) for _ in range(rng.randint(0, 3)))))
    kept = tuple(Boundary(turn=turn.turn, context_hash=turn.context_hash, state_hash=turn.state_hash, snapshot=rng.randbytes(rng.randint(0, 30)))
                 for turn in turns if boundaries)
    return Rollout(rollout_id=name, task_id=random_text(rng), turns=tuple(turns), boundaries=kept,
                   end=rng.choice(("terminated", "truncated", "overlong")), failure=random_text(rng), parent=random_text(rng))


def rng_of(seed):
    return random.Random(seed)


def random_groups(rng):
    """Groups with some failed and some overlong siblings."""
    groups = []
    for g in range(rng.randint(0, 12)):
        siblings = []
        for j in range(rng.randint(2, 5)):
            kind = rng.random()
            name = f"g{g}/{j}"
            siblings.append(failed(name, rng.choice(("A: x", "B: y"))) if kind < 0.1 else sibling(name, end="overlong") if kind < 0.2 else
                            sibling(name, *(rng.choice((0.0, 1.0)) for _ in range(rng.randint(1, 3)))))
        groups.append(group(*siblings, name=f"g{g}"))
    return groups


def credited(*groups, algorithm=RTPO):
    """SAMPLES rows of these groups under `algorithm`."""
    return credit_groups(groups_to_table(groups), algorithm=algorithm)
