"""Publishing weights: from the learner gang to every generator, proved by read-back, in one call.

    publish(version):   group up to date?  -> broadcast -> version and hash from every generator -> probe against the learner -> serve
    anyone who fails a step is taken out of service; the rest are tried again in a new group, since a broken one cannot be trusted
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from actors.gang import LearnerGang, someone_died
from actors.waiting import wait_for
from rtpo_ray.config import WeightsConfig
from rtpo_ray.errors import DeadlineExceeded, LearnerLost, WeightSyncError
from rtpo_ray.types import PushTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    version: int
    hash: str
    members: tuple[str, ...]  # who serves it now
    retired: dict[str, str] = field(default_factory=dict)  # who was taken out of service, and why
    probe_gap: float  # largest |engine - learner| log-probability of the probe
    seconds: float
    bytes: int = 0  # of all tensors, as each generator got them
    phases: dict[str, float] = field(default_factory=dict)  # seconds of the last attempt, as in `phases_of`


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a member did not end up with the weights, and whether that is its own doing."""

    reason: str
    guilty: bool

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one broadcast."""

    hash: str = ""  # of what was sent; "" when it was not
    failed: dict[str, Failure] = field(default_factory=dict)  # by member that did not end up with it
    times: PushTimes | None = None  # of the sender
    received: Sequence[PushTimes] = ()


def phases_of(attempt: Attempt, **others: float) -> dict[str, float]:
    """Seconds of a push by phase. `others` are what the publisher itself measured: connect (a new group), push (from the order to everyone's
    answer) and probe. Within the push the sender's gather, copy, wire, hash and confirm come one after the other; and load, receiver_wire,
    receiver_hash and receiver_confirm, of the receiver that took longest."""
    phases = dict(others)
    if attempt.times is not None:
        phases |= {name: getattr(attempt.times, name) for name in ("gather", "copy", "wire", "hash", "confirm")}
    if attempt.received:
        slowest = max(attempt.received, key=lambda times: times.seconds)
        phases |= {"load": slowest.load} | {f"receiver_{name}": getattr(slowest, name) for name in ("wire", "hash", "confirm")}
    return phases


class AsLoaded:
    """Publishes nothing: generators keep the weights of the model's folder, as version 0. For evaluation without a learner."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def admit(self, version: int, names: Sequence[str]) -> None:
        wait_for([self._pool.serve.remote(name, version) for name in names], 30, "the generator pool to let them serve")

    def publish(self, version: int) -> Published:
        started = time.perf_counter()
        members = [lease.member for lease in wait_for(self._pool.members.remote(), 30, "the generator pool's members")]
        wait_for([self._pool.serve.remote(name, version) for name in members], 30, "the generator pool to let them serve")
        return Published(version=version, hash="", members=tuple(members), probe_gap=0.0, seconds=time.perf_counter() - started)


ATTEMPTS = 3  # failures without a culprit before everyone who failed is replaced


class WeightPublisher:
    """Args:
    gang: the learner.
    pool: actor handle of the generator pool.
    probe_context: token ids that every generator continues after a push.
    """

    def __init__(self, gang: LearnerGang, pool: Any, config: WeightsConfig, *, temperature: float, device: str, probe_context: Sequence[int],
                 start_timeout: float = 300.0, patience: float = 150.0) -> None:
        self._start_timeout, self._patience = start_timeout, patience
        self._gang, self._pool, self._config = gang, pool, config
        self._temperature, self._device, self._probe_context = temperature, device, list(probe_context)
        self._connected: tuple[int, tuple[str, ...]] = (0, ())  # generation of the gang and members of the present group
        self._series, self._groups = uuid.uuid4().hex[:6], 0  # names of groups are never used twice, not even by two publishers of one gang

    def publish(self, version: int) -> Published:
        """Bring every generator to the learner's weights as `version`.

        Raises WeightSyncError when none can be brought there, and LearnerLost when the sender dies or does not answer.
        """
        started = time.perf_counter()
        retired: dict[str, str] = {}
        innocent = 0  # attempts that failed without anyone to blame
        empty = 0  # times that nobody was there
        while True:
            members = {lease.member: lease.generator for lease in self._ask(self._pool.members.remote())}
            if not members:  # the last one is gone, and another is starting in its place
                empty += 1
                if empty > ATTEMPTS:
                    raise WeightSyncError(f"no generator is left to take weight version {version}: {retired}")
                wait_for(self._pool.fill.remote(version), self._start_timeout + 60, f"a generator that can take weight version {version}")
                continue
            begun = time.perf_counter()
            failed = self._connect(members)
            connected = time.perf_counter()
            attempt = Attempt(failed=failed) if failed else self._attempt(version, members)
            failed, gap, pushed = attempt.failed, 0.0, time.perf_counter()
            if not failed:
                gap, failed = self._probe(version, members)
            if not failed:
                phases = phases_of(attempt, connect=connected - begun, push=pushed - connected, probe=time.perf_counter() - pushed)
                self._serve(version, members)
                return Published(version=version, hash=attempt.hash, members=tuple(members), retired=retired, probe_gap=gap,
                                 seconds=time.perf_counter() - started, bytes=attempt.times.bytes if attempt.times else 0, phases=phases)
            self._connected = (0, ())
            blamed = {name: str(failure) for name, failure in failed.items() if failure.guilty}
            innocent += not blamed
            if innocent == ATTEMPTS:
                blamed = {name: str(failure) for name, failure in failed.items()}
            for name, reason in blamed.items():
                self._ask(self._pool.report.remote(name, f"weight version {version}: {reason}"))
            retired |= blamed

    def admit(self, version: int, names: Sequence[str]) -> None:
        """Bring those who came up since to the learner's weights, which are published as `version` already. The others go on sampling.

        One try: whoever fails, to blame or not, is taken out of service, since a stage is under way. Raises LearnerLost.
        """
        members = {lease.member: lease.generator for lease in self._ask(self._pool.members.remote()) if lease.member in names}
        if not members:
            return
        failed = self._connect(members) or self._attempt(version, members).failed
        if not failed:
            _, failed = self._probe(version, members)
        if not failed:
            self._serve(version, members)
            return
        self._connected = (0, ())
        for name, failure in failed.items():
            self._ask(self._pool.report.remote(name, f"weight version {version}: {failure}"))

    def _serve(self, version: int, members: dict[str, Any]) -> None:
        self._ask([self._pool.serve.remote(name, version) for name in members])

    def _attempt(self, version: int, members: dict[str, Any]) -> Attempt:
        """One broadcast to `members`, who are connected."""
        sending = self._gang.call("send_weights", version)
        answers, failed = self._collect({name: generator.receive_weights.remote() for name, generator in members.items()})
        try:
            digest, times = ray.get(sending, timeout=2 * self._config.timeout)[0]
        except GetTimeoutError as error:  # a sender that hangs leaves every receiver without an answer: none of them is to blame
            raise LearnerLost(f"the learner did not finish sending weight version {version} within {3.5 * self._config.timeout:g} s") from error
        except RayActorError as error:
            raise LearnerLost(f"a learner rank was lost while it sent weight version {version}: {str(error).strip().splitlines()[0]}") from error
        except RayError as error:
            if someone_died(sending):  # the others noticed first
                raise LearnerLost(f"a learner rank was lost while weight version {version} was sent: {error}") from error
            if not failed:
                raise WeightSyncError(f"the learner could not send weight version {version}: {error}") from error
            return Attempt(failed=failed)
        for name, (got, got_hash, _) in answers.items():
            if (got, got_hash) != (version, digest):
                failed[name] = Failure(f"read back version {got} and hash {got_hash}; sent {version} and {digest}", guilty=True)
        return Attempt(digest, failed, times, [received for _, _, received in answers.values()])

    def _connect(self, members: dict[str, Any]) -> dict[str, Failure]:
        """A group of the sender and `members`, the present one if it is theirs; failure by member that did not join a new one."""
        if self._connected == (self._gang.generation, tuple(members)):
            return {}
        self._groups += 1
        name, world_size = f"weights-{self._series}-{self._groups}", len(members) + 1
        _, failed = self._collect({member: generator.ready.remote() for member, generator in members.items()})
        if failed:
            return failed  # the dead are known before anyone waits for them
        host, port = self._ask_sender(self._gang.ranks[0].rendezvous.remote())
        joining = {
            member: generator.join_channel.remote(
                name, index + 1, world_size, host, port, self._device, self._config.timeout, self._config.bucket_mb << 20)
            for index, (member, generator) in enumerate(members.items())}
        sender = self._gang.ranks[0].join_channel.remote(name, world_size)
        _, failed = self._collect(joining, waits=3)  # for the store, for all ranks and for their connections
        if not failed:
            self._ask_sender(sender)
            self._connected = (self._gang.generation, tuple(members))
        return failed

    def _probe(self, version: int, members: dict[str, Any]) -> tuple[float, dict[str, Failure]]:
        """Sample a few tokens everywhere and score them with the learner: (largest gap, failure by member beyond the tolerance)."""
        asked = {name: generator.probe.remote(self._probe_context, self._config.probe_tokens, self._temperature, version)
                 for name, generator in members.items()}
        probes, failed = self._collect(asked)
        scores = self._gang.score([(self._probe_context, list(probe.token_ids)) for probe in probes.values()])
        worst = 0.0
        for (name, probe), score in zip(probes.items(), scores, strict=True):
            gap = max(abs(engine - learner) for engine, learner in zip(probe.logprobs, score, strict=True))
            worst = max(worst, gap)
            if not gap <= self._config.probe_tolerance:
                failed[name] = Failure(f"log-probabilities of its probe differ from the learner's by {gap:.2e} (weights.probe_tolerance "
                                       f"{self._config.probe_tolerance:g}): it samples from other weights", guilty=True)
        return worst, failed

    def _collect(self, refs: dict[str, ray.ObjectRef], waits: int = 1) -> tuple[dict[str, Any], dict[str, Failure]]:
        """Answers, and the failures of those that raised or overran the deadline. `waits`: how often each may wait for its own timeout."""
        deadline = (waits + 0.5) * self._config.timeout
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=deadline)
        answers: dict[str, Any] = {}
        failed: dict[str, Failure] = {}
        for name, ref in refs.items():
            if ref not in ready:
                failed[name] = Failure(f"no answer within {deadline:g} s", guilty=True)
                continue
            try:
                answers[name] = ray.get(ref)
            except RayError as error:
                # A receiver that merely waited in vain for a peer is not at fault.
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                failed[name] = Failure(reason, guilty=not isinstance(error, WeightSyncError))
        return answers, failed

    def _ask(self, ref: Any) -> Any:
        return wait_for(ref, self._patience, "the generator pool while weights are published")

    def _ask_sender(self, ref: ray.ObjectRef) -> Any:
        try:
            return wait_for(ref, self._config.timeout + 30, "learner rank 0 while weights are published")
        except (RayActorError, DeadlineExceeded) as error:
            raise LearnerLost(f"learner rank 0 was lost before it sent weights: {str(error).strip().splitlines()[0]}") from error
