"""Samples to micro-batches and optimizer steps: pure functions, no communication.

Which samples share a micro-batch is decided by their tokens and ids, and which share an optimizer step by sample id and seed. Arrival order
and the number of ranks therefore change neither.

A policy takes micro-batches packed (`forest`) or, where its attention cannot do that, padded: responses of one rollout whose contexts grow
by what came before (context=append) then share one row. Attention is causal, so each is scored exactly as if it stood alone.

Axes: B sequences, L padded length, S scored tokens, M response tokens of a micro-batch. Samples that begin alike have tokens in common, so
S may be less than M.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtpo_ray.errors import ContextMismatch
from rtpo_ray.policy.forest import Layout, Placed, distinct_tokens, in_prefix_order, pack, plan_micro_batches
from rtpo_ray.types import Sample, context_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass. Response tokens are ordered by sample, then by position."""

    sample_ids: tuple[str, ...]  # in the order of the tokens; empty for a dummy
    input_ids: Tensor  # [B, L] int64, padded on the right; packed: [1, N]
    layout: Layout | None  # of a packed one
    rows: Tensor  # [S] int64, sequence of the token
    columns: Tensor  # [S] int64, position whose logits predict the token
    labels: Tensor  # [S] int64, the token
    scored: Tensor  # [M] int64, the response token's number among the S
    weights: Tensor  # [M] float32, sample.weight / T
    advantages: Tensor  # [M] float32
    engine_logprobs: Tensor  # [M] float32
    sample_index: Tensor  # [M] int64, index into sample_ids
    unique_tokens: int = 0  # distinct prefixes, of all samples that were planned together, on the first of their micro-batches

    @property
    def targets(self) -> Tensor:
        """[M] int64, the response tokens."""
        return self.labels[self.scored]

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch with its tensors on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) if isinstance(value, Tensor | Layout) else value for name, value in values.items()}
        return MicroBatch(**moved)

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Per-token values [M] as one tensor [T] a sample id."""
        if not self.sample_ids:
            return {}
        counts = torch.bincount(self.sample_index, minlength=len(self.sample_ids)).tolist()
        return dict(zip(self.sample_ids, values.split(counts), strict=True))


def check_samples(samples: Sequence[Sample], budget: int) -> None:
    """Raise what makes a sample untrainable, by name.

    ContextMismatch: its context is not the one that the engine saw. ValueError: empty context, or longer than `budget` tokens.
    """
    for sample in samples:
        found = context_hash(sample.context_ids)
        if found != sample.context_hash:
            raise ContextMismatch(f"sample {sample.sample_id}: context hash is {found}, expected {sample.context_hash} from the rollout")
        if not len(sample.context_ids):
            raise ValueError(f"sample {sample.sample_id}: context has 0 tokens, expected at least 1")
        if length(sample) > budget:
            raise ValueError(f"sample {sample.sample_id}: {length(sample)} tokens, expected at most learner.micro_batch_tokens = {budget}")


def check_unique(sample_ids: Iterable[str]) -> None:
    """ValueError when a sample came twice: it would be trained twice, unseen."""
    twice = sorted(name for name, count in Counter(sample_ids).items() if count > 1)
    if twice:
        raise ValueError(f"samples {', '.join(twice)} came more than once, expected every sample id once")


def length(sample: Sample) -> int:
    """Tokens of context and response."""
    return len(sample.context_ids) + len(sample.response_ids)


def sequences(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that share a sequence, shortest first: each one's tokens begin the next one's context. The last is the whole sequence."""
    found: list[list[Sample]] = []
    open_ends: dict[str, list[Sample]] = {}  # the last sequence of a rollout
    for sample in sorted(samples, key=lambda item: (length(item), item.sample_id)):
        before = open_ends.get(sample.rollout_id) if sample.rollout_id else None
        if before is not None and _begins(before[-1], sample):
            before.append(sample)
        else:
            found.append([sample])
            open_ends[sample.rollout_id] = found[-1]
    return found


def _begins(first: Sample, sample: Sample) -> bool:
    """Whether the tokens of `first` are the beginning of the context of `sample`."""
    split = len(first.context_ids)
    context = np.asarray(sample.context_ids)
    return (length(first) <= len(context) and np.array_equal(context[:split], np.asarray(first.context_ids))
            and np.array_equal(context[split:length(first)], np.asarray(first.response_ids)))


def plan_rows(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """For padding: every sample once, in lists whose padded size B * L is at most `budget` tokens (the samples passed `check_samples`)."""
    batches: list[list[Sample]] = []
    rows = 0  # of the last batch
    for sequence in sorted(sequences(samples), key=lambda items: (length(items[-1]), items[-1].sample_id)):
        # Lengths rise, so this sequence's length is the padded length of whatever batch it joins.
        if batches and (rows + 1) * length(sequence[-1]) <= budget:
            batches[-1] += sequence
            rows += 1
        else:
            batches.append(list(sequence))
            rows = 1
    return batches


def assign_steps(sample_ids: Iterable[str], minibatches: int, seed: int) -> dict[str, int]:
    """Optimizer step (0 .. minibatches - 1) of every sample of one epoch; step sizes differ by at most one sample.

    Give the sample ids of all ranks: the answer then does not depend on how they are spread.
    """
    shuffled = sorted(sample_ids)
    random.Random(seed).shuffle(shuffled)
    return {name: position % minibatches for position, name in enumerate(shuffled)}


def plan(samples: Sequence[Sample], budget: int, *, packed: bool, share: bool = True) -> list[Callable[[], MicroBatch]]:
    """What makes each micro-batch, on the CPU: every sample once, at most `budget` tokens that are computed (they passed `check_samples`).

    `packed`: as a forest, where samples have what they begin with in common, unless `share` is off; otherwise padded.
    """
    placed = in_prefix_order(samples)
    found: list[Callable[..., MicroBatch]]
    if packed:
        found = [partial(collate_packed, part) for part in plan_micro_batches(placed if share else in_prefix_order(samples, share=False), budget)]
    else:
        found = [partial(collate_padded, part) for part in plan_rows(samples, budget)]
    return [partial(make, unique_tokens=distinct_tokens(placed) if number == 0 else 0) for number, make in enumerate(found)]


def computed_tokens(samples: Sequence[Sample], *, packed: bool, share: bool) -> int:
    """About how many positions these samples take, without padding."""
    return distinct_tokens(in_prefix_order(samples)) if packed and share else sum(length(sample) for sample in samples)


def collate_packed(placed: Sequence[Placed], unique_tokens: int = 0) -> MicroBatch:
    """The tensors of one micro-batch of a forest."""
    found = pack(placed)
    columns = torch.from_numpy(found.columns)
    return MicroBatch(input_ids=torch.from_numpy(found.input_ids)[None], layout=found.layout, rows=torch.zeros_like(columns), columns=columns,
                      labels=torch.from_numpy(found.labels), scored=torch.from_numpy(found.scored), unique_tokens=unique_tokens,
                      **_per_token([item.sample for item in placed]))


def collate_padded(samples: Sequence[Sample], unique_tokens: int = 0) -> MicroBatch:
    """The tensors of one micro-batch of padded rows."""
    order = {sample.sample_id: number for number, sample in enumerate(samples)}
    laid = sorted(sequences(samples), key=lambda sequence: order[sequence[0].sample_id])
    row_of = {sample.sample_id: row for row, sequence in enumerate(laid) for sample in sequence}
    input_ids = torch.zeros(len(laid), max(length(sample) for sample in samples), dtype=torch.int64)
    for row, sequence in enumerate(laid):
        whole = sequence[-1]
        input_ids[row, : length(whole)] = torch.cat([_ids(whole.context_ids), _ids(whole.response_ids)])
    per_token = _per_token(samples)
    labels = torch.cat([_ids(sample.response_ids) for sample in samples])
    return MicroBatch(
        input_ids=input_ids, layout=None, rows=torch.tensor([row_of[sample.sample_id] for sample in samples])[per_token["sample_index"]],
        columns=torch.cat([torch.arange(len(sample.context_ids), length(sample)) - 1 for sample in samples]),
        labels=labels, scored=torch.arange(len(labels)), unique_tokens=unique_tokens, **per_token)


def _per_token(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of a micro-batch that do not depend on its layout."""
    counts = [len(sample.response_ids) for sample in samples]
    index = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(counts))
    weights = torch.tensor([sample.weight / count for sample, count in zip(samples, counts, strict=True)], dtype=torch.float32)
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    engine = np.concatenate([np.asarray(sample.engine_logprobs, dtype=np.float32) for sample in samples])
    return {"sample_ids": tuple(sample.sample_id for sample in samples), "weights": weights[index], "advantages": advantages[index],
            "engine_logprobs": torch.from_numpy(engine), "sample_index": index}


def dummy() -> MicroBatch:
    """One token of weight 0: keeps a rank without samples in step with the collectives of the others."""
    zero, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return MicroBatch(sample_ids=(), input_ids=zero[None], layout=None, rows=zero, columns=zero, labels=zero, scored=zero,
                      weights=nothing, advantages=nothing, engine_logprobs=nothing, sample_index=zero)


def _ids(values: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
