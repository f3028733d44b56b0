"""The records that cross a process boundary, one dataclass each.

Axes in the field comments: C tokens of a context, T tokens of a response, K turns, N siblings.
Token ids are what the engine saw and sampled. Text is never turned back into ids, and the loss mask is derived from the
record (`TurnRecord.loss_mask`), so neither can disagree with the rollout.

    task = Task(task_id="train-7", seed=1234)
    turn = TurnRecord(turn=0, context_ids=(5, 9), response_ids=(3, 2), engine_logprobs=(-0.1, -0.7), ...)
    turn.loss_mask      # (False, False, True, True)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def context_hash(token_ids: Sequence[int]) -> str:
    """Hash of a context's exact token ids (16 hex digits). Compared at rollout and again before training."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) that depends on every part and on nothing else.

    `derive_seed(run_seed, sweep, "task-3", turn, sibling)` gives siblings different streams and a rerun the same ones.
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt and its environment seed."""

    task_id: str  # unique within its split
    seed: int  # given to Environment.reset
    payload: dict[str, Any] = field(default_factory=dict)  # the row of data, JSON-like, by field of the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one response is sampled. top_p stays 1: the learner scores the distribution that was sampled from."""

    temperature: float  # 0 is greedy
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request."""

    token_ids: tuple[int, ...]  # [T], the stop token included when there is one
    logprobs: tuple[float, ...]  # [T], of each sampled token at the sampling temperature
    finish_reason: str  # "stop" or "length"
    weight_version: int
    cached_prompt_tokens: int = 0
    shareable_prompt_tokens: int = 0  # that an earlier request of these weights on this engine had too, in whole blocks of the cache

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"completion has {len(self.token_ids)} token ids and {len(self.logprobs)} log-probabilities; expected equal and > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn as the engine and the environment saw it."""

    turn: int  # k
    context_ids: tuple[int, ...]  # [C] c_k, exactly what the engine was given
    context_hash: str
    response_ids: tuple[int, ...]  # [T] l_k, exactly what the engine sampled
    engine_logprobs: tuple[float, ...]  # [T]
    weight_version: int
    seed: int
    temperature: float
    finish_reason: str  # "stop" or "length"
    observation: str  # f_k; empty at the end of the episode
    reward: float  # r_k
    state_hash: str  # of the environment at the boundary, before l_k
    tool_calls: int = 0
    malformed_calls: int = 0  # of those: could not be run
    failed_calls: int = 0  # of those: were run and ended in an error
    cached_prompt_tokens: int = 0
    shareable_prompt_tokens: int = 0  # as of a Completion: what the cache could have had
    kind: str = "action"  # or "summary": the model's own account of the turn, sampled after its observation
    train_context_ids: tuple[int, ...] = ()  # where the learner scores the response when that is not c_k; empty: in c_k

    def __post_init__(self) -> None:
        if not self.context_ids or not self.response_ids:
            raise ValueError(f"turn {self.turn}: context has {len(self.context_ids)} tokens and response {len(self.response_ids)}; expected > 0")
        if len(self.response_ids) != len(self.engine_logprobs):
            raise ValueError(f"turn {self.turn}: {len(self.response_ids)} response tokens but {len(self.engine_logprobs)} log-probabilities")
        if context_hash(self.context_ids) != self.context_hash:
            raise ValueError(f"turn {self.turn}: context hash {self.context_hash} is not that of its {len(self.context_ids)} token ids")

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """[C + T]: true exactly on the tokens that the engine sampled."""
        return (False,) * len(self.context_ids) + (True,) * len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """S_k of a trunk, ready to be restored anywhere."""

    turn: int  # k
    context_hash: str  # of c_k
    state_hash: str
    snapshot: bytes  # opaque: environment and context builder


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A trunk, a sibling with its continuation, or an evaluation episode."""

    rollout_id: str
    task_id: str
    turns: tuple[TurnRecord, ...]  # [K'] records in order; a sibling's begin at its boundary
    boundaries: tuple[Boundary, ...] = ()  # of trunks only, one a realised turn
    end: str = "terminated"  # terminated | truncated | overlong | capped (the stage's time ran out) | failed
    failure: str = ""  # first error message when end == "failed"
    parent: str = ""  # rollout id of the trunk whose boundary it started from; empty: from the task itself
    generator: str = ""  # name of the generator that sampled it; empty: unknown

    @property
    def returns_to_go(self) -> float:
        """Sum of the rewards from the first recorded turn on (gamma = 1)."""
        return float(sum(turn.reward for turn in self.turns))


def failed_rollout(rollout_id: str, task_id: str, failure: str) -> Rollout:
    """A rollout of which nothing is left but the reason."""
    return Rollout(rollout_id=rollout_id, task_id=task_id, turns=(), end="failed", failure=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts that share a baseline: the siblings of one boundary (same c_k, same environment state), or all rollouts of a task."""

    group_id: str  # task/trunk/turn, or the task
    task_id: str
    turn: int | None  # the turn that is trained; None: all of them
    siblings: tuple[Rollout, ...]  # [N]
    pilots: int = 0  # the first so many were sampled before the others, and decided about these; 0: all at once
    chance: float = 1.0  # probability with which pilots such as these are followed by others


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to train on. `weight` is its share of its group's objective, spread evenly over its T tokens; with weight 0 it is
    scored but not trained."""

    sample_id: str  # rollout:turn
    context_ids: Sequence[int]  # [C]
    context_hash: str
    response_ids: Sequence[int]  # [T]
    engine_logprobs: Sequence[float]  # [T]
    advantage: float
    weight: float
    rollout_id: str = ""
    group_id: str = ""
    turn: int = 0
    reward: float = 0.0  # r_k

    def __post_init__(self) -> None:
        if len(self.response_ids) != len(self.engine_logprobs) or not len(self.response_ids):
            raise ValueError(f"sample {self.sample_id}: {len(self.response_ids)} response tokens, {len(self.engine_logprobs)} log-probabilities")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTimes:
    """What one rank of the weight channel spent on one version. Phases are seconds in which it did nothing else; what the wire did meanwhile
    is hidden in them."""

    bytes: int = 0  # of all tensors
    seconds: float = 0.0  # from the header to the confirmed hash
    gather: float = 0.0  # sender: until the learner's shards were full tensors
    copy: float = 0.0  # sender: packing buckets
    wire: float = 0.0  # waiting for buckets
    hash: float = 0.0
    load: float = 0.0  # receiver: what the engine did with the tensors
    confirm: float = 0.0  # waiting for the other side's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one update did, over all ranks and equal on all of them. "Gap" is learner minus engine log-probability of a token,
    before the first optimizer step."""

    loss: float  # mean over the optimizer steps of -J_k
    grad_norm: float  # mean over the optimizer steps, before clipping
    logprob_gap_mean: float  # mean |gap|
    logprob_gap_max: float  # max |gap|
    ratio_geomean: float  # exp(mean gap); 1 when engine and learner agree
    k3: float  # estimate of KL(engine || learner) per token
    clip_fraction: float  # share of token uses whose gradient the clip removed
    tokens: int  # response tokens of the samples, each counted once
    learner_tokens: int  # positions of the forward and backward passes, padding and repeated epochs included
    unique_tokens: int  # of these, what a rank has to compute once: prefixes that are distinct among its samples of a step
    optimizer_steps: int  # that were taken
    refused: str  # "" or why a step was refused: "samples a, b" or "gradient norm"
