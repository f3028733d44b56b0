"""The weight channel: one sender broadcasts a whole model to its receivers, in a process group of its own.

    sender (learner rank 0)                           receivers (one a generator)
    store = open_store(host, timeout)  -- port --> WeightChannel(name, rank, world, host, port, ...)
    channel.send(version, specs, tensors) -- header, then buckets of bytes --> incoming = channel.receive()
                                                                               for name, tensor in incoming.tensors(): ...
    waits for every receiver's hash       <-- hash through the store --------- the last tensor was taken

Both ends work while bytes are on the wire: the sender gathers, packs and hashes the next bucket, a receiver hashes and
loads one bucket while the next ones arrive. Tensors travel as raw bytes, so any dtype works on gloo. A changed membership means a
new channel under a new name on the same store; a channel that failed once refuses further use. Every wait has the channel's
timeout, and every failure is a WeightSyncError that says which channel and rank waited for what.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtpo_ray.errors import WeightSyncError
from rtpo_ray.network import join_store
from rtpo_ray.timeline import Timeline
from rtpo_ray.types import PushTimes
from rtpo_ray.weights.buckets import Bucket, Recycled, buckets
from rtpo_ray.weights.hashing import TensorSpec, WeightsHash, as_bytes, spec_of, torch_dtype

SENDER = 0
IN_FLIGHT = 2  # buckets on the wire at once: of the sender, and of a receiver while it loads another


class Stopwatch:
    """Seconds by phase of one push on one rank."""

    def __init__(self, nbytes: int, timeline: Timeline | None) -> None:
        self._nbytes, self._timeline = nbytes, timeline
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, span: bool = False, **details: Any) -> Iterator[None]:
        """Count what the block takes for `name`, a field of PushTimes; with `span` also on the timeline."""
        started, began = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            if span:
                self.keep(name, began, **details)

    def keep(self, name: str, began: float, lane: str = "", **details: Any) -> None:
        """A span on the timeline, if there is one, from `began` (seconds since the epoch) until now."""
        if self._timeline is not None:
            self._timeline.add(name, began, time.time(), lane, **details)

    def times(self) -> PushTimes:
        """Until now."""
        return PushTimes(bytes=self._nbytes, seconds=time.perf_counter() - self._started, **self._seconds)


class Wire:
    """The slices of one push that are under way, first in, first out."""

    def __init__(self, channel: WeightChannel, watch: Stopwatch) -> None:
        self._channel, self._watch = channel, watch
        self._works: deque[tuple[Any, Tensor, str, float]] = deque()  # the memory stays until its work is done
        self._before = 0.0  # when the last one was done: what overlaps it counts as one bucket after the other

    def put(self, raw: Tensor, what: str) -> None:
        """Begin the broadcast of `raw`, uint8 [n], whose memory belongs to the wire until `wait` returned for it."""
        self._works.append((self._channel._begin_broadcast(raw, what), raw, what, time.time()))

    def wait(self, left: int) -> None:
        """Until no more than `left` broadcasts are under way."""
        while len(self._works) > left:
            work, raw, what, began = self._works[0]
            with self._watch.phase("wire"):
                self._channel._finish_broadcast(work, what)
            self._works.popleft()
            self._watch.keep("bucket", max(began, self._before), bytes=raw.numel())
            self._before = time.time()


class Incoming:
    """One version on its way to a receiver."""

    def __init__(self, channel: WeightChannel, version: int, specs: list[TensorSpec], bucket_bytes: int) -> None:
        self.version, self.specs = version, specs
        self._channel, self._bucket_bytes = channel, bucket_bytes
        self._watch = Stopwatch(sum(spec.nbytes for spec in specs), channel.timeline)
        self._digest = ""
        self.times = PushTimes()  # once the last tensor was taken

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the sender's order, on the channel's device. Read it to its end, once.

        A tensor's memory is a part of its bucket's, which nobody else writes to and which is free again when all of its tensors are.
        """
        digest, watch = WeightsHash(), self._watch
        for bucket, memory in self._arrivals():
            parts = [(spec, memory[start : start + spec.nbytes]) for spec, start in bucket.parts]
            del memory
            with watch.phase("hash"):
                for spec, raw in parts:
                    digest.add_bytes(spec, raw)
            with watch.phase("load", span=True, tensors=len(parts)):
                for spec, raw in parts:
                    yield spec.name, raw.view(torch_dtype(spec.dtype)).view(spec.shape)
                del parts, raw
        with watch.phase("hash"):
            found = digest.hexdigest()
        with watch.phase("confirm"):
            self._channel._confirm(self.version, found)
        self._digest, self.times = found, watch.times()

    def _arrivals(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The buckets with their bytes; the next ones are on the wire while one is loaded."""
        wire = Wire(self._channel, self._watch)
        ahead: deque[tuple[Bucket, Tensor, int]] = deque()

        def arrived() -> tuple[Bucket, Tensor]:
            bucket, memory, _ = ahead.popleft()
            wire.wait(sum(pieces for _, _, pieces in ahead))
            return bucket, memory

        for bucket in buckets(self.specs, self._bucket_bytes):
            memory, pieces = self._channel.recycled.take(bucket.nbytes), 0
            for pieces, piece in enumerate(bucket.slices(self._bucket_bytes), 1):  # noqa: B007 - their number
                wire.put(memory[piece], f"a bucket of version {self.version} up to {bucket.parts[-1][0].name}")
            ahead.append((bucket, memory, pieces))
            del memory
            if len(ahead) > IN_FLIGHT:
                yield arrived()
        while ahead:
            yield arrived()

    @property
    def hash(self) -> str:
        """Hash of what arrived, equal to the sender's. WeightSyncError before the last tensor was taken."""
        if not self._digest:
            raise WeightSyncError(f"weight channel {self._channel.name}: version {self.version} has no hash before its last tensor")
        return self._digest


class WeightChannel:
    """One end of a channel. Rank 0 sends; ranks 1 .. world_size - 1 receive. World size 1 is a sender without receivers.

    Construction is collective: it returns when every rank is there, and raises WeightSyncError that names the absent ones.
    With a timeline, every version, bucket and loading is a span on it.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, host: str, port: int, device: torch.device | str, timeout_seconds: float,
        bucket_bytes: int, timeline: Timeline | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; expected at least 1")
        self.name, self.rank, self.world_size = name, rank, world_size
        self.device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._bucket_bytes = bucket_bytes
        self.timeline, self.recycled = timeline, Recycled(self.device)
        self.times = PushTimes()  # of the last version that was sent
        self._packing: list[Tensor] = []  # the sender's buffers; every other bucket has the same
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
        watch, began, digest = Stopwatch(sum(spec.nbytes for spec in specs), self.timeline), time.time(), WeightsHash()
        header = json.dumps({"version": version, "specs": specs, "bucket_bytes": self._bucket_bytes}).encode()
        payload = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([len(payload)], device=self.device), f"the size of the header of version {version}")
        self._broadcast(payload, f"the header of version {version}")
        wire, matched = Wire(self, watch), self._matched(version, specs, stream)
        for number, bucket in enumerate(buckets(specs, self._bucket_bytes)):
            wire.wait(IN_FLIGHT - 1)  # so that the buffer is free again
            raw = self._packed(bucket, number, matched, digest, watch)
            for piece in bucket.slices(self._bucket_bytes):
                wire.wait(IN_FLIGHT - 1)
                wire.put(raw[piece], f"a bucket of version {version} up to {bucket.parts[-1][0].name}")
            if len(bucket.parts) == 1:
                with watch.phase("hash"):
                    digest.add_bytes(bucket.parts[0][0], raw)
        for _ in matched:  # nothing: it looks whether there is more than was announced
            pass
        wire.wait(0)
        with watch.phase("hash"):
            found = digest.hexdigest()
        with watch.phase("confirm"):
            self._confirm(version, found)
        watch.keep(f"send version {version}", began, "push")
        self.times = watch.times()
        return found

    def _packed(
        self, bucket: Bucket, number: int, tensors: Iterator[tuple[TensorSpec, Tensor]], digest: WeightsHash, watch: Stopwatch
    ) -> Tensor:
        """The bucket's bytes: the tensor's own memory when there is one tensor in it, otherwise one of the two buffers. What is packed is
        hashed at once, while a core's cache holds it."""
        if len(bucket.parts) == 1:
            with watch.phase("gather"):
                _, tensor = next(tensors)
            with watch.phase("copy"):
                return as_bytes(tensor).to(self.device)
        if len(self._packing) < IN_FLIGHT:  # zeros, because what lies between two tensors is sent too
            self._packing = [self.recycled.take(self._bucket_bytes).zero_() for _ in range(IN_FLIGHT)]
        packed = self._packing[number % IN_FLIGHT][: bucket.nbytes]
        for spec, start in bucket.parts:
            with watch.phase("gather"):
                _, tensor = next(tensors)
            raw = packed[start : start + spec.nbytes]
            with watch.phase("copy"):
                raw.copy_(as_bytes(tensor))
            with watch.phase("hash"):
                digest.add_bytes(spec, raw)
        return packed

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
        self._finish_broadcast(self._begin_broadcast(tensor, what), what)

    def _begin_broadcast(self, tensor: Tensor, what: str) -> Any:
        """The work that is under way. On a GPU it has a stream of its own, which waits for what the present one was given so far."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._timeout
        return self._guard(f"{what}, with {self._peers}", lambda: self._group.broadcast([tensor], options))

    def _finish_broadcast(self, work: Any, what: str) -> None:
        """Wait until it is over; with a timeout NCCL's work holds up this thread too, so that the memory may be used again."""
        self._guard(f"{what}, with {self._peers}", lambda: work.wait(self._timeout))

    def _guard(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise self._fail(f"waited at most {self._seconds} s for {what}: {error}") from error

    def _fail(self, message: str) -> WeightSyncError:
        self._broken = message
        return WeightSyncError(f"weight channel {self.name}, rank {self.rank} of {self.world_size}: {message}")

    @property
    def _peers(self) -> str:
        return f"receivers (ranks 1 to {self.world_size - 1})" if self.rank == SENDER else f"the sender (rank {SENDER})"

    @property
    def _seconds(self) -> str:
        return f"{self._timeout.total_seconds():g}"
