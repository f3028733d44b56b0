"""What a version is cut into for the wire: whole tensors packed into buckets, and the memory that buckets arrive in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rtpo_ray.weights.hashing import TensorSpec

KEPT = 5  # buckets whose memory a receiver uses again: two on the wire, one that is loaded, parts that the engine still waits to complete
ALIGNED = 16  # bytes: where a tensor may begin in a bucket, so that any dtype's view of it is allowed


class Bucket(NamedTuple):
    """What is packed and loaded together: tensors, each with its first byte."""

    parts: tuple[tuple[TensorSpec, int], ...]
    nbytes: int

    def slices(self, bucket_bytes: int) -> Iterator[slice]:
        """What is sent at once: all of it, unless it is one tensor that is larger than a bucket."""
        return (slice(start, min(start + bucket_bytes, self.nbytes)) for start in range(0, self.nbytes, bucket_bytes))


def buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[Bucket]:
    """The tensors in order, as many in a bucket as fit into `bucket_bytes`, and one that does not fit by itself. None is torn apart."""
    parts: list[tuple[TensorSpec, int]] = []
    filled = 0
    for spec in specs:
        start = -(-filled // ALIGNED) * ALIGNED
        if parts and start + spec.nbytes > bucket_bytes:
            yield Bucket(tuple(parts), filled)
            parts, start = [], 0
        parts.append((spec, start))
        filled = start + spec.nbytes
    if parts:
        yield Bucket(tuple(parts), filled)


class Recycled:
    """Memory of buckets, used again as soon as no tensor refers to it.

    torch does so itself on GPUs. On CPUs it would give every bucket back to the system, and taking it again, page by page, costs
    about as much as the wire.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []  # with what its last tensors hold on to

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of anything."""
        if self._device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        free = [memory for memory, holder in self._kept if holder() is None and memory.nbytes >= nbytes]
        memory = min(free, key=len) if free else np.empty(max(nbytes, ALIGNED), dtype=np.uint8)
        view = memory[:]
        others = [kept for kept in self._kept if kept[0] is not memory]
        self._kept = [*others[1 - KEPT :], (memory, weakref.ref(view))]  # one that is dropped lives as long as its tensors
        return torch.from_numpy(view)[:nbytes]
