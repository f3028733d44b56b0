"""The generator pool: who may sample, at which weight version, how much each has to do, and how many there should be.

    STARTING ─► JOINING ─► SERVING ◄─► SUSPECT ─► GONE
      its actor   up; to be    │        does not answer
      may wait    brought to   └─► LEAVING ─► GONE        its node goes: it finishes what it has
      for a node  the weights

A member serves only at the version that it proved by read-back, so a lease never reaches stale weights. Leases wait until some
member has room for them, so whoever joins in the middle of a stage gets a part of what is left. A member that dies, overruns a
deadline or cannot be brought to a version is killed and replaced. An actor that waits for a node is what makes an autoscaler add one.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from actors.telemetry import PoolTelemetry
from actors.waiting import on_node
from rtpo_ray.errors import NoGenerators


class Membership(enum.Enum):
    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True)
class Member:
    name: str
    generator: Any  # actor handle
    state: Membership = Membership.STARTING
    version: int = -1  # weight version proved by read-back
    rollouts: int = 0  # leased to it
    leases: int = 0
    node: str = ""  # id of the node it runs on
    reason: str = ""  # why it is gone
    asked: asyncio.Task[None] | None = None  # whether it is alive
    silent: float = 0.0  # seconds of looking without an answer
    lag: float = 0.0  # seconds that its episode loop took to answer


@dataclass(frozen=True, slots=True)
class Lease:
    member: str
    generator: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """least, most: generators kept; each: rollouts that one samples at once; the rest in seconds."""

    least: int
    most: int
    each: int
    start_timeout: float
    lost_after: float = 120.0  # without an answer, a member is killed; after a quarter of it, it gets nothing new


STILLBORN = 3  # generators lost with their nodes before they were up that are replaced at once; further ones when the next stage begins


def generators_wanted(rollouts: int, each: int, least: int, most: int) -> int:
    """How many generators a stage of so many rollouts deserves, when one samples `each` at once."""
    return max(least, min(most, math.ceil(rollouts / each)))


class GeneratorPool:
    """Args:
    spawn: makes a generator actor under a name.
    limits: how many, how full, how patient.
    draining: ids of the nodes that are about to go.
    run: name of the run, for its metrics; empty: none are kept.
    """

    def __init__(self, spawn: Callable[[str], Any], limits: PoolLimits, draining: Callable[[], Iterable[str]] = tuple, run: str = "") -> None:
        self._spawn, self._limits, self._draining = spawn, limits, draining
        self._telemetry = PoolTelemetry(run) if run else None
        self._wanted = limits.least
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Condition()
        self._born = 0
        self._stillborn = 0  # lost with their nodes before they were up, since the last stage began
        self._waiting = 0  # leases asked for and not granted
        self._lag = 0.0  # seconds by which the pool's own loop was late
        self._busy_since: float | None = None
        self._busy = 0.0
        self._retired: dict[str, str] = {}  # since the last take_retired
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"GeneratorPool({self._limits.least} to {self._limits.most}{on_node()})"

    # --- who there is

    async def resize(self, rollouts: int, release: bool) -> int:
        """Aim at what a stage of so many rollouts deserves; nothing is waited for. `release`: end idle ones beyond that, instead of keeping
        them warm. Returns how many are aimed at."""
        for member in self._alive():  # nobody samples now; a lease that is still out died with whoever held it
            member.leases = member.rollouts = 0
            if member.state is Membership.LEAVING:
                await self._end(member, member.reason)
        self._stillborn = 0
        wanted = generators_wanted(rollouts, self._limits.each, self._limits.least, self._limits.most)
        self._wanted = wanted if release else max(wanted, self._wanted)
        self._spawn_missing()
        surplus = len(self._alive()) - self._wanted
        idle = [member for member in self._alive() if not member.leases]
        for member in sorted(idle, key=lambda m: (m.state is Membership.SERVING, -_number(m.name)))[:max(0, surplus)]:
            await self._end(member, "not needed")
        return self._wanted

    async def fill(self, version: int, least: int = 1) -> list[str]:
        """Start what is missing and wait until `least` are up; returns who is up and does not serve `version`.

        Raises NoGenerators when every start failed.
        """
        self._spawn_missing()
        async with self._changed:
            undecided = (Membership.STARTING, Membership.SUSPECT)
            while len(self._up()) < least and any(m.state in undecided for m in self._members.values()):
                await self._changed.wait()  # every start ends within start_timeout, every suspicion within lost_after
        if not self._up():
            raise NoGenerators("no generator became ready: " + "; ".join(f"{m.name}: {m.reason}" for m in self._members.values()))
        return [m.name for m in self._up() if m.state is not Membership.SERVING or m.version != version]

    async def joining(self, patience: float) -> list[str]:
        """Who is up and serves no version yet, as soon as there is someone; nobody after `patience` seconds."""
        until = time.monotonic() + patience
        async with self._changed:
            while not (found := self._unfit()) and (left := until - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    break
        return found

    async def members(self) -> list[Lease]:
        """Those that a push must reach: up, answering and staying."""
        for member in self._alive():
            if member.state is Membership.SUSPECT and (member.asked is None or member.asked.done()):
                member.state = Membership.JOINING
        return [Lease(member.name, member.generator) for member in self._up()]

    async def serve(self, name: str, version: int) -> None:
        """`name` proved that it holds `version`."""
        member = self._members.get(name)
        if member is not None and member.state in (Membership.JOINING, Membership.SERVING, Membership.SUSPECT):
            member.state, member.version = Membership.SERVING, version
        await self._notify()

    async def report(self, name: str, reason: str) -> None:
        """Take `name` out of service for good, and start another in its place."""
        member = self._members.get(name)
        if member is not None and member.state is not Membership.GONE:
            started = member.state is not Membership.STARTING
            await self._end(member, reason)
            if started:  # one that could not start is tried again when the next stage begins, not at once for ever
                self._spawn_missing()

    # --- who has how much to do

    async def lease(self, version: int, rollouts: int, avoid: tuple[str, ...], patience: float, prefer: str = "") -> Lease:
        """The least loaded member that serves `version` and has room, others than `avoid` if there are; `prefer`, whose cache may have what the
        rollouts start from, unless it has half as many more to do than another. Raises NoGenerators when `patience`
        (seconds) runs out, or at once when there is none and none is starting."""
        until = time.monotonic() + patience
        self._waiting += 1
        try:
            async with self._changed:
                while not (able := self._able(version, rollouts, avoid)):
                    if not self._alive():
                        raise NoGenerators("every generator is gone: " + "; ".join(f"{m.name}: {m.reason}" for m in self._members.values()))
                    left = until - time.monotonic()
                    if left <= 0:
                        raise NoGenerators(f"no generator came to weight version {version} with room for {rollouts} rollouts in {patience:.0f} s; "
                                           f"members: {self._describe()}")
                    try:
                        await asyncio.wait_for(self._changed.wait(), left)
                    except TimeoutError:
                        continue  # the check above then says what was waited for
        finally:
            self._waiting -= 1
        member = min(able, key=lambda m: (m.rollouts - rollouts / 2 * (m.name == prefer and m.name not in avoid), _number(m.name)))
        member.leases, member.rollouts = member.leases + 1, member.rollouts + rollouts
        self._account()
        return Lease(member.name, member.generator)

    def _able(self, version: int, rollouts: int, avoid: tuple[str, ...]) -> list[Member]:
        serving = [m for m in self._members.values() if m.state is Membership.SERVING and m.version == version]
        others = [m for m in serving if m.name not in avoid] or serving
        room = 2 * self._limits.each - rollouts  # one batch at work, one waiting
        return [m for m in others if not m.leases or m.rollouts <= room]

    async def release(self, name: str, rollouts: int) -> None:
        """A lease of `name` ended well."""
        member = self._members.get(name)
        if member is not None and member.state is not Membership.GONE:
            member.leases, member.rollouts = max(0, member.leases - 1), max(0, member.rollouts - rollouts)
            if member.state is Membership.LEAVING and not member.leases:
                await self._end(member, member.reason)
        self._account()
        await self._notify()

    async def take_busy_seconds(self) -> float:
        """Seconds since the last call in which at least one lease was out."""
        self._account()
        busy, self._busy = self._busy, 0.0
        return busy

    async def take_retired(self) -> dict[str, str]:
        """Who was taken out of service since the last call, and why. They are then forgotten."""
        retired, self._retired = self._retired, {}
        self._members = {name: m for name, m in self._members.items() if m.state is not Membership.GONE or name not in retired}
        return retired

    async def status(self) -> dict[str, dict[str, Any]]:
        """State, version, load, node and reason by name."""
        return {m.name: {"state": m.state.value, "version": m.version, "leases": m.leases, "rollouts": m.rollouts, "node": m.node,
                         "reason": m.reason, "lag": m.lag} for m in self._members.values()}

    async def queue_depth(self) -> int:
        """Leases that wait for room."""
        return self._waiting

    # --- who is still there

    async def watch(self, period: float) -> None:
        """Every `period` seconds: who answers, and whose node is about to go. Runs until the pool ends."""
        while True:
            await self.look(period)
            due = time.monotonic() + period
            await asyncio.sleep(period)
            self._lag = time.monotonic() - due

    async def look(self, period: float) -> None:
        """One round of `watch`."""
        leaving = set(self._draining())
        for member in self._alive():
            if member.node in leaving and member.state is not Membership.LEAVING:
                member.state, member.reason = Membership.LEAVING, "its node is drained"
                self._spawn_missing()
                if not member.leases:
                    await self._end(member, member.reason)
            elif member.state is not Membership.STARTING:
                await self._ask(member, period)
        await self._notify()
        if self._telemetry is not None:
            members = {m.name: (m.state.value, m.version) for m in self._members.values()}
            lags = {m.name: 0.0 if m.state is Membership.GONE else max(m.lag, m.silent) for m in self._members.values()}
            lags["rtpo-generator-pool"] = self._lag
            self._telemetry.observe([state.value for state in Membership], members, self._waiting, lags)

    async def _ask(self, member: Member, period: float) -> None:
        """Whether `member` answers: ask, or judge how long it has not. Rounds are counted, not time: a pool that stood still blames nobody."""
        if member.asked is None or member.asked.done():
            if member.state is Membership.SUSPECT:
                member.state = Membership.JOINING  # it answered; it may have missed a push, so it proves its weights again
            member.asked, member.silent = self._in_background(self._answers(member)), 0.0
            return
        member.silent += period
        if member.silent > self._limits.lost_after:
            await self.report(member.name, f"did not answer for {member.silent:.0f} s")
        elif member.silent > self._limits.lost_after / 4 and member.state in (Membership.SERVING, Membership.JOINING):
            member.state = Membership.SUSPECT

    async def _answers(self, member: Member) -> None:
        try:
            member.lag = await member.generator.alive.remote()
        except RayError as error:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
            await self.report(member.name, ("died: " if isinstance(error, RayActorError) else "broken: ") + reason)

    # --- how

    def _spawn_missing(self) -> None:
        """Those that leave are replaced while they finish."""
        for _ in range(self._wanted - sum(member.state is not Membership.LEAVING for member in self._alive())):
            name = f"rtpo-generator-{self._born}"
            self._born += 1
            member = self._members[name] = Member(name, self._spawn(name))
            self._in_background(self._await_ready(member))

    async def _await_ready(self, member: Member) -> None:
        try:
            member.node = await asyncio.wait_for(member.generator.ready.remote(), self._limits.start_timeout)
        except (RayError, TimeoutError) as error:
            if member.state is Membership.GONE:
                return  # it was ended before it was up
            await self.report(member.name, f"did not start: {type(error).__name__}: {error}")
            if isinstance(error, RayActorError) and not error.actor_init_failed and self._stillborn < STILLBORN:
                self._stillborn += 1  # it was lost with its node, not by a fault of its own
                self._spawn_missing()
            return
        if member.state is Membership.STARTING:
            member.state = Membership.JOINING
        await self._notify()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept until it ends; what it raises is a defect, and asyncio's own report of it is loud."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, member: Member, reason: str) -> None:
        member.state, member.reason, member.leases, member.rollouts = Membership.GONE, reason, 0, 0
        self._retired[member.name] = reason
        ray.kill(member.generator)
        self._account()
        await self._notify()

    def _alive(self) -> list[Member]:
        return [member for member in self._members.values() if member.state is not Membership.GONE]

    def _up(self) -> list[Member]:
        return [member for member in self._members.values() if member.state in (Membership.JOINING, Membership.SERVING)]

    def _unfit(self) -> list[str]:
        """Who is up and serves no version yet; one that still samples takes no weights."""
        return [m.name for m in self._members.values() if m.state is Membership.JOINING and not m.leases]

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


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
