"""The generator pool: who may sample, at which weight version, and who is busy.

Membership: JOINING -> SERVING -> GONE. A member serves only at the version that it proved by read-back, so a lease never
reaches stale weights. A member that dies, overruns a deadline or cannot be brought to a version is killed and replaced; the
replacement joins with the next push.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from rtpo_ray.errors import NoGenerators


class Membership(enum.Enum):
    JOINING = "joining"
    SERVING = "serving"
    GONE = "gone"


@dataclass(slots=True)
class Member:
    name: str
    generator: Any  # actor handle
    state: Membership = Membership.JOINING
    version: int = -1  # weight version proved by read-back
    leases: int = 0
    reason: str = ""  # why it is gone


@dataclass(frozen=True, slots=True)
class Lease:
    member: str
    generator: Any


class GeneratorPool:
    """Args:
    spawn: makes a generator actor under a name.
    count: how many to keep.
    start_timeout: seconds that one may take to become ready.
    """

    def __init__(self, spawn: Callable[[str], Any], count: int, start_timeout: float) -> None:
        self._spawn, self._count, self._start_timeout = spawn, count, start_timeout
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Condition()
        self._born = 0
        self._busy_since: float | None = None
        self._busy = 0.0
        self._retired: dict[str, str] = {}  # since the last take_retired

    def __repr__(self) -> str:
        return "GeneratorPool"

    async def fill(self, version: int) -> list[str]:
        """Start generators until `count` live; returns who does not serve `version` yet. Raises NoGenerators when none comes up."""
        fresh = []
        for _ in range(self._count - len(self._alive())):
            name = f"rtpo-generator-{self._born}"
            self._born += 1
            self._members[name] = Member(name, self._spawn(name))
            fresh.append(self._members[name])
        await asyncio.gather(*(self._await_ready(member) for member in fresh))
        alive = self._alive()
        if not alive:
            raise NoGenerators("no generator became ready: " + "; ".join(f"{m.name}: {m.reason}" for m in self._members.values()))
        return [m.name for m in alive if m.state is not Membership.SERVING or m.version != version]

    async def _await_ready(self, member: Member) -> None:
        try:
            await asyncio.wait_for(member.generator.ready.remote(), self._start_timeout)
        except (ray.exceptions.RayError, TimeoutError) as error:
            await self.report(member.name, f"did not start: {type(error).__name__}: {error}")

    async def members(self) -> list[Lease]:
        """Those that a push must reach."""
        return [Lease(member.name, member.generator) for member in self._alive()]

    async def serve(self, name: str, version: int) -> None:
        """`name` proved that it holds `version`."""
        member = self._members[name]
        if member.state is not Membership.GONE:
            member.state, member.version = Membership.SERVING, version
        await self._notify()

    async def report(self, name: str, reason: str) -> None:
        """Take `name` out of service for good."""
        member = self._members[name]
        if member.state is not Membership.GONE:
            member.state, member.reason = Membership.GONE, reason
            self._retired[name] = reason
            ray.kill(member.generator)
        member.leases = 0
        self._account()
        await self._notify()

    async def lease(self, version: int, avoid: tuple[str, ...], patience: float) -> Lease:
        """The least loaded member that serves `version`, others than `avoid` first. Raises NoGenerators when `patience` (seconds) runs out."""
        until = time.monotonic() + patience
        async with self._changed:
            while True:
                able = [m for m in self._members.values() if m.state is Membership.SERVING and m.version == version]
                if able:
                    break
                if not self._alive():
                    raise NoGenerators("every generator is gone: " + "; ".join(f"{m.name}: {m.reason}" for m in self._members.values()))
                left = until - time.monotonic()
                if left <= 0:
                    raise NoGenerators(f"no generator came to weight version {version} in {patience:.0f} s; members: {self._describe()}")
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    continue  # the check above then says what was waited for
        member = min(able, key=lambda m: (m.name in avoid, m.leases, m.name))
        member.leases += 1
        self._account()
        return Lease(member.name, member.generator)

    async def release(self, name: str) -> None:
        """A lease of `name` ended well."""
        self._members[name].leases = max(0, self._members[name].leases - 1)
        self._account()

    async def take_busy_seconds(self) -> float:
        """Seconds since the last call in which at least one lease was out."""
        self._account()
        busy, self._busy = self._busy, 0.0
        return busy

    async def take_retired(self) -> dict[str, str]:
        """Who was taken out of service since the last call, and why."""
        retired, self._retired = self._retired, {}
        return retired

    async def status(self) -> dict[str, dict[str, Any]]:
        """State, version, leases and reason by name."""
        return {m.name: {"state": m.state.value, "version": m.version, "leases": m.leases, "reason": m.reason} for m in self._members.values()}

    def _alive(self) -> list[Member]:
        return [member for member in self._members.values() if member.state is not Membership.GONE]

    def _describe(self) -> str:
        return ", ".join(f"{m.name} {m.state.value} at {m.version}" for m in self._members.values())

    def _account(self) -> None:
        """Add the time since the last call if a lease was out."""
        now = time.monotonic()
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if any(member.leases for member in self._members.values()) else None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
