"""The generator pool without Ray: who may sample, at which version, and how long someone was busy."""

import asyncio
import types

import pytest
from ray.exceptions import RayActorError

from actors import pool as pool_module
from actors.pool import GeneratorPool, Lease
from rtpo_ray.errors import NoGenerators


class Handle:
    """An actor handle whose `ready` answers, raises or never ends."""

    def __init__(self, name, ready):
        self.name = name
        self.ready = types.SimpleNamespace(remote=ready)


@pytest.fixture
def killed(monkeypatch):
    """Names of the generators that were killed."""
    names = []
    monkeypatch.setattr(pool_module.ray, "kill", lambda handle: names.append(handle.name))
    return names


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(pool_module, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


async def good():
    return "up"


async def bad():
    raise RayActorError(error_msg="no kernel for this CPU")


async def never():
    await asyncio.sleep(60)


def make(count=2, ready=None, start_timeout=5.0):
    """A pool whose n-th generator behaves like the n-th of `ready`."""
    behaviour = iter(ready or [])
    return GeneratorPool(lambda name: Handle(name, next(behaviour, good)), count, start_timeout)


def name(i):
    return f"rtpo-generator-{i}"


async def serving(count=2, version=0):
    pool = make(count)
    for one in await pool.fill(version):
        await pool.serve(one, version)
    return pool


def test_fill_starts_what_is_missing_and_names_who_does_not_serve(killed):
    async def scenario():
        pool = make(3)
        assert await pool.fill(0) == [name(0), name(1), name(2)]
        assert {one["state"] for one in (await pool.status()).values()} == {"joining"}
        await pool.serve(name(0), 0)
        await pool.serve(name(1), 1)
        assert await pool.fill(0) == [name(1), name(2)]
        assert [lease.member for lease in await pool.members()] == [name(0), name(1), name(2)]

    asyncio.run(scenario())
    assert killed == []


def test_a_lease_reaches_only_who_serves_that_version(killed):
    async def scenario():
        pool = await serving(3, version=4)
        await pool.serve(name(1), 5)
        assert {(await pool.lease(4, (), 1)).member for _ in range(4)} == {name(0), name(2)}
        lease = await pool.lease(5, (), 1)
        assert isinstance(lease, Lease) and (lease.member, lease.generator.name) == (name(1), name(1))

    asyncio.run(scenario())


def test_a_lease_waits_for_the_version_and_then_says_what_it_waited_for(killed):
    async def scenario():
        pool = await serving(2, version=0)
        waiting = asyncio.create_task(pool.lease(1, (), 5))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await pool.serve(name(1), 1)
        assert (await waiting).member == name(1)
        with pytest.raises(NoGenerators, match=f"no generator came to weight version 2 in 0 s; "
                                               f"members: {name(0)} serving at 0, {name(1)} serving at 1"):
            await pool.lease(2, (), 0.02)

    asyncio.run(scenario())


def test_a_joining_member_is_never_leased(killed):
    async def scenario():
        pool = make(1)
        await pool.fill(0)
        with pytest.raises(NoGenerators, match=f"{name(0)} joining at -1"):
            await pool.lease(-1, (), 0)

    asyncio.run(scenario())


def test_the_least_loaded_is_leased_and_the_avoided_only_when_there_is_no_other(killed):
    async def scenario():
        pool = await serving(2)
        taken = [(await pool.lease(0, (), 1)).member for _ in range(4)]
        assert taken == [name(0), name(1), name(0), name(1)]
        await pool.release(name(1))
        assert (await pool.lease(0, (), 1)).member == name(1)
        assert (await pool.lease(0, (name(0),), 1)).member == name(1)
        assert [one["leases"] for one in (await pool.status()).values()] == [2, 3]
        await pool.report(name(1), "died")
        assert (await pool.lease(0, (name(0),), 1)).member == name(0)

    asyncio.run(scenario())


def test_a_reported_member_is_gone_for_good_and_replaced_at_the_next_fill(killed):
    async def scenario():
        pool = await serving(2)
        await pool.lease(0, (), 1)
        await pool.report(name(0), "died")
        await pool.report(name(0), "died again")
        await pool.release(name(0))  # its lease ends late
        await pool.serve(name(0), 0)  # and so does its push
        assert (await pool.status())[name(0)] == {"state": "gone", "version": 0, "leases": 0, "reason": "died"}
        assert [lease.member for lease in await pool.members()] == [name(1)]
        assert await pool.fill(0) == [name(2)]
        assert [lease.member for lease in await pool.members()] == [name(1), name(2)]
        assert {(await pool.lease(0, (), 1)).member for _ in range(3)} == {name(1)}  # the new one has not proved its weights

    asyncio.run(scenario())
    assert killed == [name(0)]


def test_who_waits_is_told_when_everyone_is_gone(killed):
    async def scenario():
        pool = await serving(2)
        waiting = asyncio.create_task(pool.lease(1, (), 60))
        await asyncio.sleep(0)
        await pool.report(name(0), "died")
        await pool.report(name(1), "overran")
        with pytest.raises(NoGenerators, match=f"every generator is gone: {name(0)}: died; {name(1)}: overran"):
            await asyncio.wait_for(waiting, 2)

    asyncio.run(scenario())


def test_one_that_does_not_start_is_left_out_with_its_reason(killed):
    async def scenario():
        pool = make(3, [good, bad, never], start_timeout=0.05)
        assert await pool.fill(0) == [name(0)]
        status = await pool.status()
        assert status[name(1)]["reason"].startswith("did not start: RayActorError: ") and "no kernel for this CPU" in status[name(1)]["reason"]
        assert status[name(2)]["reason"].startswith("did not start: TimeoutError")
        assert await pool.fill(0) == [name(0), name(3), name(4)]

    asyncio.run(scenario())
    assert killed == [name(1), name(2)]


def test_no_generator_at_all_is_an_error_with_every_reason(killed):
    async def scenario():
        with pytest.raises(NoGenerators, match=f"no generator became ready: {name(0)}: did not start.*{name(1)}: did not start"):
            await make(2, [bad, never], start_timeout=0.02).fill(0)

    asyncio.run(scenario())


def test_busy_seconds_are_those_with_a_lease_out(killed, clock):
    async def scenario():
        pool = await serving(2)
        clock.seconds += 5
        assert await pool.take_busy_seconds() == 0.0
        await pool.lease(0, (), 1)
        clock.seconds += 2
        await pool.lease(0, (), 1)  # overlaps: the union counts, not the sum
        clock.seconds += 3
        await pool.release(name(0))
        clock.seconds += 1
        assert await pool.take_busy_seconds() == 6.0
        clock.seconds += 4
        await pool.release(name(1))
        clock.seconds += 100
        assert await pool.take_busy_seconds() == 4.0
        assert await pool.take_busy_seconds() == 0.0
        await pool.lease(0, (), 1)
        clock.seconds += 1
        await pool.report(name(0), "died")
        clock.seconds += 50
        assert await pool.take_busy_seconds() == 1.0

    asyncio.run(scenario())
