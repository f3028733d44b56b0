"""Named tensors as bytes: what they are called, and a hash of them that costs little more than reading them once."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """What a receiver must know before the bytes come. `dtype` is torch's name without the prefix, such as "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """"bfloat16" -> torch.bfloat16. ValueError when torch has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {name!r}; expected a torch dtype such as float32 or bfloat16")
    return found


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's elements as uint8 [n]; a view when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class WeightsHash:
    """Hash of named tensors in order, computed where they lie; equal on CPUs and GPUs.

    Each tensor's bytes are read as 64-bit words in rows of 4096. Rows are added up, and so are columns, over all tensors, with
    wrap-around; two numbers remain, one of all rows' sums and of what fills no row, one of the columns' sums: each word of these is mixed
    with its position by a bijection and the results are added. So any change within one word is always seen, because exactly
    one row changes, and so are exchanged words but for a chance of 2**-64: they lie in different rows or in different columns, and two sums
    change. Other changes are missed by that chance too, unless they keep every sum of a row and of a column, which takes
    at least four words at the corners of a rectangle whose changes cancel out. A sum of words times positions could not promise it: two
    floats that differ in the sign bit only could be exchanged. Mixing every word could, and takes eight times as long.
    """

    # Odd, so that multiplying is a bijection; written as signed 64-bit numbers.
    _STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
    _ROW = 4096  # words
    _CPU_ROWS = 16  # that are read twice in a row: 512 KiB, which stay in a core's cache

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._rows: list[Tensor] = []  # sums of rows, and words that fill none
        self._columns: Tensor | None = None  # [_ROW] over all tensors

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor. Nothing waits for the device."""
        self.add_bytes(spec_of(name, tensor), as_bytes(tensor))

    def add_bytes(self, spec: TensorSpec, raw: Tensor) -> None:
        """The same of the tensor's bytes, uint8 [n]."""
        self._specs.append(spec)
        if raw.storage_offset() % 8:
            raw = raw.clone()  # a view as 64-bit words needs an aligned start
        words = raw[: raw.numel() // 8 * 8].view(torch.int64)
        rows = words.numel() // self._ROW
        if rows:
            self._rows.append(self._add_rows(words[: rows * self._ROW].view(rows, self._ROW)))
        if raw.numel() > 8 * rows * self._ROW:
            rest = raw[8 * rows * self._ROW :]
            padded = torch.zeros(-(-rest.numel() // 8) * 8, dtype=torch.uint8, device=raw.device)
            padded[: rest.numel()] = rest
            self._rows.append(padded.view(torch.int64))

    def hexdigest(self) -> str:
        """16 hex digits over the names, shapes, dtypes and bytes so far."""
        sums = [self._mixed_sum(part) for part in (torch.cat(self._rows) if self._rows else None, self._columns) if part is not None]
        return hashlib.blake2b(json.dumps([self._specs, [int(value) for value in sums]]).encode(), digest_size=8).hexdigest()

    def _add_rows(self, words: Tensor) -> Tensor:
        """Sums of the rows, int64 [R], of int64 [R, _ROW]; the columns are added to what there is."""
        sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
        if self._columns is None:
            self._columns = torch.zeros(self._ROW, dtype=torch.int64, device=words.device)
        step = self._CPU_ROWS if words.device.type == "cpu" else len(words)
        for start in range(0, len(words), step):
            part = words[start : start + step]
            self._columns += part.sum(0)
            torch.sum(part, 1, out=sums[start : start + step])
        return sums

    @classmethod
    def _mixed_sum(cls, words: Tensor) -> Tensor:
        """int64 scalar of int64 [n]."""
        x = torch.arange(1, 1 + words.numel(), dtype=torch.int64, device=words.device)
        x.mul_(cls._STEP).add_(words)
        for shift, factor in ((30, cls._FIRST), (27, cls._SECOND)):
            # The mask makes torch's arithmetic shift a logical one; without it the step would not be a bijection.
            x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1)).sum()
