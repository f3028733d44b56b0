"""The weight channel: one sender broadcasts a whole model to its receivers, in a process group of its own.

    sender (learner rank 0)                           receivers (one a generator)
    store = open_store(host, timeout)  -- port --> WeightChannel(name, rank, world, host, port, ...)
    channel.send(version, specs, tensors) -- header, then buckets of bytes --> incoming = channel.receive()
                                                                               for name, tensor in incoming.tensors(): ...
    waits for every receiver's hash       <-- hash through the store --------- the last tensor was taken

Tensors travel as raw bytes, so any dtype works on gloo. A changed membership means a new channel under a new name on the same
store; a channel that failed once refuses further use. Every wait has the channel's timeout, and every failure is a
WeightSyncError that says which channel and rank waited for what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rtpo_ray.errors import WeightSyncError
from rtpo_ray.network import join_store

SENDER = 0


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


class WeightsHash:
    """Hash of named tensors in order, computed where they lie; equal on CPUs and GPUs.

    Each tensor's bytes are read as 64-bit words; a word is mixed with its position by a bijection and the results are added
    with wrap-around. So any change within one word is always seen, and exchanged words with probability 1 - 2**-64, which a
    plain position-weighted sum cannot promise (two floats that differ in the sign bit only could be exchanged).
    """

    # Odd, so that multiplying is a bijection; written as signed 64-bit numbers.
    _STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._sums: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor. Nothing waits for the device."""
        self._specs.append(spec_of(name, tensor))
        self._sums.append(self._checksum(as_bytes(tensor)))

    def hexdigest(self) -> str:
        """16 hex digits over the names, shapes, dtypes and bytes so far."""
        sums = [int(value) for value in self._sums]
        return hashlib.blake2b(json.dumps([self._specs, sums]).encode(), digest_size=8).hexdigest()

    @classmethod
    def _checksum(cls, raw: Tensor) -> Tensor:
        """int64 scalar of uint8 [n]."""
        if raw.storage_offset() % 8:
            raw = raw.clone()  # a view as 64-bit words needs an aligned start
        whole = raw.numel() // 8 * 8
        words = raw[:whole].view(torch.int64)
        tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total = cls._mixed_sum(tail.view(torch.int64), words.numel())
        chunk = 2**16 if raw.device.type == "cpu" else 2**23  # a CPU's cache holds a chunk and its scratch copy
        for start in range(0, words.numel(), chunk):
            total += cls._mixed_sum(words[start : start + chunk], start)
        return total

    @classmethod
    def _mixed_sum(cls, words: Tensor, start: int) -> Tensor:
        x = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=words.device)
        x.mul_(cls._STEP).add_(words)
        for shift, factor in ((30, cls._FIRST), (27, cls._SECOND)):
            # The mask makes torch's arithmetic shift a logical one; without it the step would not be a bijection.
            x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1)).sum()


class Incoming:
    """One version on its way to a receiver."""

    def __init__(self, channel: WeightChannel, version: int, specs: list[TensorSpec], bucket_bytes: int) -> None:
        self.version, self.specs = version, specs
        self._channel, self._bucket_bytes = channel, bucket_bytes
        self._digest = ""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the sender's order, each freshly allocated on the channel's device. Read it to its end, once."""
        digest = WeightsHash()
        left = sum(spec.nbytes for spec in self.specs)
        bucket = torch.empty(min(self._bucket_bytes, left), dtype=torch.uint8, device=self._channel.device)
        position = size = 0
        for spec in self.specs:
            raw = torch.empty(spec.nbytes, dtype=torch.uint8, device=self._channel.device)
            filled = 0
            while filled < raw.numel():
                if position == size:
                    position, size = 0, min(self._bucket_bytes, left)
                    self._channel._broadcast(bucket[:size], f"a bucket of version {self.version} up to {spec.name}")
                    left -= size
                count = min(size - position, raw.numel() - filled)
                raw[filled : filled + count].copy_(bucket[position : position + count])
                filled, position = filled + count, position + count
            tensor = raw.view(torch_dtype(spec.dtype)).view(spec.shape)
            digest.add(spec.name, tensor)
            yield spec.name, tensor
        found = digest.hexdigest()
        self._channel._confirm(self.version, found)
        self._digest = found

    @property
    def hash(self) -> str:
        """Hash of what arrived, equal to the sender's. WeightSyncError before the last tensor was taken."""
        if not self._digest:
            raise WeightSyncError(f"weight channel {self._channel.name}: version {self.version} has no hash before its last tensor")
        return self._digest


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's elements as uint8 [n]; a view when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class WeightChannel:
    """One end of a channel. Rank 0 sends; ranks 1 .. world_size - 1 receive. World size 1 is a sender without receivers.

    Construction is collective: it returns when every rank is there, and raises WeightSyncError that names the absent ones.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, host: str, port: int, device: torch.device | str, timeout_seconds: float,
        bucket_bytes: int,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; expected at least 1")
        self.name, self.rank, self.world_size = name, rank, world_size
        self.device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._bucket_bytes = bucket_bytes
        self._transfers = 0  # of this channel so far; makes the store's keys of one transfer unique
        self._broken = ""
        self._store = self._guard(f"the weight store at {host}:{port}", lambda: self._connect(host, port))
        self._meet("join", "", f"ranks of the {world_size} to join", range(world_size))
        self._group: Any = self._guard(f"the process group of {world_size} ranks", self._open_group)

    def send(self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Broadcast `tensors`, which must be exactly what `specs` lists, and return their hash once every receiver has confirmed it.

        `tensors` is always read to its end, also when sending fails: its producer may be a collective of all learner ranks.
        """
        stream = iter(tensors)
        try:
            return self._send(version, specs, stream)
        finally:
            for _ in stream:
                pass

    def receive(self) -> Incoming:
        """Wait for the sender's next version. Take every tensor before the next call."""
        if self.rank == SENDER:
            raise ValueError(f"weight channel {self.name}: rank {SENDER} is the sender; it cannot receive")
        self._begin("a version was not received to its end")
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(size, "the size of a header")
        payload = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        self._broadcast(payload, "a header")
        header = json.loads(payload.cpu().numpy().tobytes())
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in header["specs"]]
        return Incoming(self, header["version"], specs, header["bucket_bytes"])

    def close(self) -> None:
        """Leave the group. The other ranks' next collective on this channel fails."""
        self._broken = "it was closed"
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # shutdown may wait for a peer that is gone

    def _send(self, version: int, specs: Sequence[TensorSpec], stream: Iterator[tuple[str, Tensor]]) -> str:
        if self.rank != SENDER:
            raise ValueError(f"weight channel {self.name}: rank {self.rank} is a receiver; only rank {SENDER} sends")
        self._begin(f"version {version} was not sent to its end")
        header = json.dumps({"version": version, "specs": specs, "bucket_bytes": self._bucket_bytes}).encode()
        payload = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([len(payload)], device=self.device), f"the size of the header of version {version}")
        self._broadcast(payload, f"the header of version {version}")
        digest = WeightsHash()
        bucket, filled = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self.device), 0
        for spec, tensor in self._matched(version, specs, stream):
            digest.add(spec.name, tensor)
            raw = as_bytes(tensor)
            taken = 0
            while taken < raw.numel():
                count = min(self._bucket_bytes - filled, raw.numel() - taken)
                bucket[filled : filled + count].copy_(raw[taken : taken + count])
                filled, taken = filled + count, taken + count
                if filled == self._bucket_bytes:
                    self._broadcast(bucket, f"a bucket of version {version} up to {spec.name}")
                    filled = 0
        if filled:
            self._broadcast(bucket[:filled], f"the last bucket of version {version}")
        found = digest.hexdigest()
        self._confirm(version, found)
        return found

    def _matched(
        self, version: int, specs: Sequence[TensorSpec], stream: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[TensorSpec, Tensor]]:
        """The tensors beside their specs. WeightSyncError at the first that is not what the header promised."""
        for spec in specs:
            name, tensor = next(stream, ("nothing", torch.empty(0)))
            found = spec_of(name, tensor)
            if found != spec:
                raise self._fail(f"sending version {version}: next tensor is {tuple(found)}, expected {tuple(spec)}")
            yield spec, tensor.detach()
        extra = next(stream, None)
        if extra is not None:
            raise self._fail(f"sending version {version}: tensor {extra[0]} is not among the {len(specs)} announced")

    def _confirm(self, version: int, digest: str) -> None:
        """Exchange hashes through the store; the broadcast itself may succeed at the sender although a receiver died.

        The sender waits for everyone, a receiver for the sender only: it need not fail because another one did.
        """
        ranks = range(self.world_size) if self.rank == SENDER else (SENDER,)
        hashes = self._meet(f"hash/{self._transfers}", digest, f"the hash of version {version}", ranks)
        wrong = [f"{found} on rank {rank}" for rank, found in zip(ranks, hashes, strict=True) if found != digest]
        if wrong:
            raise self._fail(f"hash of version {version} is {digest} on rank {self.rank}, but {', '.join(wrong)}")
        self._broken = ""

    def _connect(self, host: str, port: int) -> dist.Store:
        return dist.PrefixStore(self.name, join_store(host, port, self._timeout.total_seconds()))

    def _open_group(self) -> Any:
        store = dist.PrefixStore("group", self._store)
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process at its own timeout. Ours, in _broadcast, comes first and raises.
        options._timeout = 4 * self._timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

    def _meet(self, key: str, value: str, awaited: str, ranks: Sequence[int]) -> list[str]:
        """Put down `value` and return those of `ranks`. The error names the ranks that did not come."""
        keys = [f"{key}/{rank}" for rank in ranks]
        try:
            self._store.set(f"{key}/{self.rank}", value)
            self._store.wait(keys, self._timeout)
            return [self._store.get(each).decode() for each in keys]
        except RuntimeError as error:
            raise self._fail(f"waited {self._seconds} s for {awaited}; absent: {self._absent(key, ranks)}") from error

    def _absent(self, key: str, ranks: Sequence[int]) -> str:
        try:
            return ", ".join(f"rank {rank}" for rank in ranks if not self._store.check([f"{key}/{rank}"])) or "none"
        except RuntimeError as error:  # the store went away as well, and with it the sender that serves it
            return f"rank {SENDER}, whose store does not answer ({error})"

    def _begin(self, unfinished: str) -> None:
        """Start a transfer. Until `_confirm`, the group's next bytes belong to it, so anything else must not use the group."""
        if self._broken:
            raise WeightSyncError(f"weight channel {self.name}, rank {self.rank}: unusable since {self._broken}; build a new channel")
        self._broken = unfinished
        self._transfers += 1

    def _broadcast(self, tensor: Tensor, what: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._timeout
        peers = f"receivers (ranks 1 to {self.world_size - 1})" if self.rank == SENDER else f"the sender (rank {SENDER})"
        self._guard(f"{what}, with {peers}", lambda: self._group.broadcast([tensor], options).wait(self._timeout))

    def _guard(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise self._fail(f"waited at most {self._seconds} s for {what}: {error}") from error

    def _fail(self, message: str) -> WeightSyncError:
        self._broken = message
        return WeightSyncError(f"weight channel {self.name}, rank {self.rank} of {self.world_size}: {message}")

    @property
    def _seconds(self) -> str:
        return f"{self._timeout.total_seconds():g}"
