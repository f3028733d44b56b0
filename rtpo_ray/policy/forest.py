"""Samples as a forest: every distinct prefix is computed once, and nothing is padded in the layers that work token by token.

Siblings of a group share their context, chains of a task its prompt, later contexts of a rollout continue earlier ones. Sorted by their
tokens, samples that begin alike are neighbours, and what each adds to the one before it is a run of new tokens below some token of that
one. A micro-batch is the runs, one after the other, as one sequence [1, N] with position = depth in the tree. A response's last token
predicts nothing and is left out.

Attention goes over blocks of runs: a block's queries are its own tokens, its keys these and their ancestors outside. A run that is longer
than what is above it is computed with its ancestors as ordinary causal attention, which costs half of a masked one; short runs are put
together under one mask. Blocks of about the same size are computed together.

Axes: N tokens of the micro-batch, S scored tokens, Q and K queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtpo_ray.types import Sample

Ints = np.ndarray[Any, np.dtype[np.int64]]

_WASTE = 1.5  # pairs of queries and keys that a mask or padding may compute for each that counts
_FREE = 64 * 64  # such pairs that cost less than another call of the kernel


@dataclass(frozen=True, slots=True)
class Placed:
    """A sample in the order of its tokens."""

    sample: Sample
    ids: Ints  # [C + T - 1]: context and response, without the last token
    shared: int  # how many of them the sample before begins with too


@dataclass(frozen=True, slots=True)
class Call:
    """Blocks that are computed together: [blocks, Q] on [blocks, K]."""

    blocks: int
    queries: int
    keys: int
    mask: Tensor | None  # [blocks, 1, Q, K] bool, or what `with_bias` made of it; None: causal, Q = K


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the queries and keys of every call are in the packed sequence, and where its tokens are in their outputs."""

    positions: Tensor  # [1, N] int64, depth
    queries: Tensor  # int64, of all calls
    keys: Tensor  # int64, of all calls
    back: Tensor  # [N] int64
    calls: tuple[Call, ...]

    def to(self, device: torch.device) -> Layout:
        """The same on `device`."""
        calls = tuple(replace(call, mask=None if call.mask is None else call.mask.to(device)) for call in self.calls)
        return Layout(self.positions.to(device), self.queries.to(device), self.keys.to(device), self.back.to(device), calls)

    def with_bias(self, dtype: torch.dtype, sharing: int) -> Layout:
        """The same with masks as 0 and -inf in `dtype`, each row for `sharing` heads with common keys: made once, where every layer would
        make and keep its own."""
        def bias(mask: Tensor | None) -> Tensor | None:
            if mask is None:
                return None
            return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf).repeat_interleave(sharing, dim=2)
        return replace(self, calls=tuple(replace(call, mask=bias(call.mask)) for call in self.calls))


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch's tokens, once each, and which of them are scored."""

    input_ids: Ints  # [N]
    columns: Ints  # [S] the token whose logits predict it
    labels: Ints  # [S]
    scored: Ints  # [M] of the samples' response tokens: its number among the S
    layout: Layout


@dataclass(slots=True)
class _Run:
    start: int
    end: int
    above: int  # number of its ancestors
    path: Ints  # where these and the run itself are

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def causal(self) -> bool:
        return self.above < len(self)

    @property
    def pairs(self) -> int:
        """What it costs by itself."""
        return (self.above + len(self)) ** 2 // 2 if self.causal else len(self) * (self.above + len(self))


def in_prefix_order(samples: Sequence[Sample], share: bool = True) -> list[Placed]:
    """Sorted by tokens, then by id; without `share` no sample shares anything."""
    sequences = [np.concatenate([np.asarray(s.context_ids, dtype=np.int64), np.asarray(s.response_ids[:-1], dtype=np.int64)]) for s in samples]
    keys = [ids.astype(">u4").tobytes() for ids in sequences]  # big-endian bytes sort as the tokens do
    order = sorted(range(len(samples)), key=lambda number: (keys[number], samples[number].sample_id))
    found: list[Placed] = []
    for number in order:
        ids = sequences[number]
        found.append(Placed(samples[number], ids, _common(found[-1].ids, ids) if share and found else 0))
    return found


def plan_micro_batches(placed: Sequence[Placed], budget: int) -> list[list[Placed]]:
    """Every sample once, in lists of at most `budget` distinct tokens (no sample is longer). A group is torn apart only when it is larger."""
    batches: list[list[Placed]] = []
    room = 0  # in the last batch
    for group in _groups(placed):
        if distinct_tokens(group) > room and group[0].shared + distinct_tokens(group) <= budget:
            batches.append([])
            room = budget
        for item in group:
            if len(item.ids) - item.shared > room:
                batches.append([])
                room = budget
            kept = item if batches[-1] else replace(item, shared=0)
            batches[-1].append(kept)
            room -= len(kept.ids) - kept.shared
    return batches


def pack(placed: Sequence[Placed]) -> Packed:
    """The tensors of one micro-batch, in the order of `placed`, whose first shares nothing."""
    total = distinct_tokens(placed)
    input_ids, depth = (np.empty(total, dtype=np.int64) for _ in range(2))
    runs: list[_Run] = []
    columns: list[Ints] = []
    path = np.empty(0, dtype=np.int64)
    at = 0
    for item in placed:
        new = len(item.ids) - item.shared
        if new:
            continues = item.shared and item.shared == len(path)
            path = np.concatenate([path[: item.shared], np.arange(at, at + new)])
            if continues:
                runs[-1].end, runs[-1].path = at + new, path
            else:
                runs.append(_Run(at, at + new, item.shared, path))
            input_ids[at : at + new] = item.ids[item.shared :]
            depth[at : at + new] = np.arange(item.shared, len(item.ids))
            at += new
        columns.append(path[len(item.sample.context_ids) - 1 :])
    labels = np.concatenate([np.asarray(item.sample.response_ids, dtype=np.int64) for item in placed])
    pairs, scored = np.unique((np.concatenate(columns) << 32) | labels, return_inverse=True)
    return Packed(input_ids=input_ids, columns=pairs >> 32, labels=pairs & 0xFFFFFFFF, scored=scored,
                  layout=_layout(depth, [_block(group) for group in _merged(runs)]))


def distinct_tokens(placed: Sequence[Placed]) -> int:
    """Of samples that share what they can."""
    return sum(len(item.ids) - item.shared for item in placed)


def _common(left: Ints, right: Ints) -> int:
    """Length of the longest common prefix."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _groups(placed: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Neighbours of one group; a sample of no group is one by itself."""
    group: list[Placed] = []
    for item in placed:
        if group and not (item.sample.group_id and item.sample.group_id == group[-1].sample.group_id):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _merged(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Neighbouring runs whose common block wastes little."""
    group: list[_Run] = []
    size = alone = 0
    for run in runs:
        together = (size + len(run)) * ((group[0].above if group else 0) + size + len(run))
        if group and together > _WASTE * (alone + run.pairs) + _FREE:
            yield group
            group, size, alone = [], 0, 0
        group.append(run)
        size, alone = size + len(run), alone + run.pairs
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Block:
    queries: Ints  # positions
    keys: Ints
    skip: int  # of the queries, the first that are computed elsewhere
    mask: np.ndarray[Any, np.dtype[np.bool_]] | None  # [Q, K]; None: causal


def _block(runs: Sequence[_Run]) -> _Block:
    first = runs[0]
    if len(runs) == 1 and first.causal:
        return _Block(first.path, first.path, first.above, None)
    own = np.arange(first.start, runs[-1].end)
    outside = first.path[: first.above]  # whatever is above a later run and not in the block is above the first one too
    mask = np.zeros((len(own), len(outside) + len(own)), dtype=np.bool_)
    for run in runs:
        above, rows = run.path[: run.above], slice(run.start - first.start, run.end - first.start)
        inside = above[above >= first.start] - first.start + len(outside)
        mask[rows, : run.above - len(inside)] = True
        mask[rows, inside] = True
        mask[rows, len(outside) :][:, rows] = np.tri(len(run), dtype=np.bool_)
    return _Block(own, np.concatenate([outside, own]), 0, mask)


def _layout(depth: Ints, blocks: Sequence[_Block]) -> Layout:
    back = np.empty(len(depth), dtype=np.int64)
    queries: list[Ints] = []
    keys: list[Ints] = []
    calls: list[Call] = []
    at = 0
    for together in _together(blocks):
        q = max(len(block.queries) for block in together)
        k = max(len(block.keys) for block in together)
        causal = together[0].mask is None
        k = q if causal else -(-k // 8) * 8  # kernels want rows of a mask aligned
        mask = None if causal else np.zeros((len(together), 1, q, k), dtype=np.bool_)
        for number, block in enumerate(together):
            queries.append(np.pad(block.queries, (0, q - len(block.queries))))
            keys.append(np.pad(block.keys, (0, k - len(block.keys))))
            back[block.queries[block.skip :]] = np.arange(at + block.skip, at + len(block.queries))
            at += q
            if mask is not None:
                mask[number, 0, : len(block.queries), : len(block.keys)] = block.mask
                mask[number, 0, len(block.queries) :, 0] = True  # a row that sees nothing is not a number
        calls.append(Call(len(together), q, k, None if mask is None else torch.from_numpy(mask)))
    return Layout(positions=torch.from_numpy(depth)[None], queries=torch.from_numpy(np.concatenate(queries)),
                  keys=torch.from_numpy(np.concatenate(keys)), back=torch.from_numpy(back), calls=tuple(calls))


def _together(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Blocks of one kind and about one size."""
    group: list[_Block] = []
    pairs = widest = 0
    for block in sorted(blocks, key=lambda block: (block.mask is None, len(block.queries), len(block.keys))):
        size = len(block.queries) * len(block.keys)
        padded = (len(group) + 1) * len(block.queries) * max(widest, len(block.keys))
        if group and ((group[0].mask is None) != (block.mask is None) or padded > _WASTE * (pairs + size) + _FREE):
            yield group
            group, pairs, widest = [], 0, 0
        group.append(block)
        pairs, widest = pairs + size, max(widest, len(block.keys))
    if group:
        yield group
