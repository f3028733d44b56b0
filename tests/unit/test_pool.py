"""The generator pool without Ray: who may sample, at which version, and how long someone was busy."""

import asyncio
import types

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors import pool as pool_module
from actors.pool import GeneratorPool, Lease, PoolLimits, generators_wanted
from rtpo_ray.errors import EngineError, NoGenerators


class Handle:
    """An actor handle whose `ready` answers, raises or never ends; `alive` too, as its `life` says."""

    def __init__(self, name, ready):
        self.name, self.life = name, good
        self.ready = types.SimpleNamespace(remote=ready)
        self.alive = types.SimpleNamespace(remote=lambda: self.life())


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
    return "here"


async def elsewhere():
    return "elsewhere"


async def bad():
    raise RayActorError(error_msg="no kernel for this CPU", actor_init_failed=True)


async def stillborn():
    raise RayActorError(error_msg="its node has died")


async def never():
    await asyncio.sleep(60)


def make(count=2, ready=None, start_timeout=5.0, most=None, draining=tuple, **limits):
    """A pool whose n-th generator behaves like the n-th of `ready`; one samples 100 rollouts at once."""
    behaviour = iter(ready or [])
    limits = PoolLimits(least=count, most=most or count, each=100, start_timeout=start_timeout, **limits)
    return GeneratorPool(lambda name: Handle(name, next(behaviour, good)), limits, draining)


def name(i):
    return f"rtpo-generator-{i}"


async def settle():
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def serving(count=2, version=0, **options):
    pool = make(count, **options)
    for one in await pool.fill(version, count):
        await pool.serve(one, version)
    return pool


def test_fill_starts_what_is_missing_and_names_who_does_not_serve(killed):
    async def scenario():
        pool = make(3)
        assert await pool.fill(0, 3) == [name(0), name(1), name(2)]
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
        assert {(await pool.lease(4, 10, (), 1)).member for _ in range(4)} == {name(0), name(2)}
        lease = await pool.lease(5, 10, (), 1)
        assert isinstance(lease, Lease) and (lease.member, lease.generator.name) == (name(1), name(1))

    asyncio.run(scenario())


def test_a_lease_waits_for_the_version_and_then_says_what_it_waited_for(killed):
    async def scenario():
        pool = await serving(2, version=0)
        waiting = asyncio.create_task(pool.lease(1, 10, (), 5))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await pool.serve(name(1), 1)
        assert (await waiting).member == name(1)
        with pytest.raises(NoGenerators, match=f"no generator came to weight version 2 with room for 10 rollouts in 0 s; "
                                               f"members: {name(0)} serving at 0, {name(1)} serving at 1"):
            await pool.lease(2, 10, (), 0.02)

    asyncio.run(scenario())


def test_the_preferred_is_leased_unless_it_has_much_to_do_is_avoided_or_at_another_version(killed):
    async def scenario():
        pool = await serving(3)
        assert [(await pool.lease(0, 40, (), 1, name(2))).member for _ in range(4)] == [name(2), name(0), name(1), name(2)]
        assert (await pool.lease(0, 10, (name(2),), 1, name(2))).member == name(0)
        assert (await pool.lease(0, 10, (), 1, "rtpo-generator-9")).member == name(1)  # is gone
        await pool.release(name(2), 80)
        assert (await pool.lease(0, 10, (), 1, name(2))).member == name(2)
        await pool.serve(name(2), 1)
        assert (await pool.lease(0, 10, (), 1, name(2))).member == name(0)

    asyncio.run(scenario())


def test_a_joining_member_is_never_leased(killed):
    async def scenario():
        pool = make(1)
        await pool.fill(0)
        with pytest.raises(NoGenerators, match=f"{name(0)} joining at -1"):
            await pool.lease(-1, 10, (), 0)

    asyncio.run(scenario())


def test_the_least_loaded_is_leased_and_the_avoided_only_when_there_is_no_other(killed):
    async def scenario():
        pool = await serving(2)
        taken = [(await pool.lease(0, 10, (), 1)).member for _ in range(4)]
        assert taken == [name(0), name(1), name(0), name(1)]
        await pool.release(name(1), 10)
        assert (await pool.lease(0, 10, (), 1)).member == name(1)
        assert (await pool.lease(0, 10, (name(0),), 1)).member == name(1)
        assert [(one["leases"], one["rollouts"]) for one in (await pool.status()).values()] == [(2, 20), (3, 30)]
        await pool.report(name(1), "died")
        assert (await pool.lease(0, 10, (name(0),), 1)).member == name(0)

    asyncio.run(scenario())


def test_a_reported_member_is_gone_for_good_and_replaced_at_once(killed):
    async def scenario():
        pool = await serving(2)
        await pool.lease(0, 10, (), 1)
        await pool.report(name(0), "died")
        await pool.report(name(0), "died again")
        await pool.release(name(0), 10)  # its lease ends late
        await pool.serve(name(0), 0)  # and so does its push
        gone = (await pool.status())[name(0)]
        assert gone == {"state": "gone", "version": 0, "leases": 0, "rollouts": 0, "node": "here", "reason": "died", "lag": 0.0}
        assert [lease.member for lease in await pool.members()] == [name(1)] and await pool.joining(5) == [name(2)]
        assert await pool.fill(0) == [name(2)]
        assert [lease.member for lease in await pool.members()] == [name(1), name(2)]
        assert {(await pool.lease(0, 10, (), 1)).member for _ in range(3)} == {name(1)}  # the new one has not proved its weights

    asyncio.run(scenario())
    assert killed == [name(0)]


def test_who_waits_is_told_when_everyone_is_gone(killed):
    async def scenario():
        pool = await serving(2, ready=[good, good, bad, bad])
        waiting = asyncio.create_task(pool.lease(1, 10, (), 60))
        await asyncio.sleep(0)
        await pool.report(name(0), "died")
        await pool.report(name(1), "overran")
        with pytest.raises(NoGenerators, match=f"every generator is gone: {name(0)}: died; {name(1)}: overran; {name(2)}: did not start"):
            await asyncio.wait_for(waiting, 2)

    asyncio.run(scenario())


def test_one_that_does_not_start_is_left_out_with_its_reason(killed):
    async def scenario():
        pool = make(3, [good, bad, never], start_timeout=0.05)
        assert await pool.fill(0, 3) == [name(0)]
        status = await pool.status()
        assert status[name(1)]["reason"].startswith("did not start: RayActorError: ") and "no kernel for this CPU" in status[name(1)]["reason"]
        assert status[name(2)]["reason"].startswith("did not start: TimeoutError")
        assert await pool.fill(0, 3) == [name(0), name(3), name(4)]

    asyncio.run(scenario())
    assert killed == [name(1), name(2)]


def test_one_that_is_lost_with_its_node_before_it_is_up_is_replaced_at_once_but_not_for_ever(killed):
    async def scenario():
        pool = make(2, [stillborn, good, stillborn, good, stillborn, stillborn, stillborn, good])
        assert await pool.fill(0, 2) == [name(1), name(3)]
        await pool.report(name(1), "died")
        await settle()
        assert [m for m, entry in (await pool.status()).items() if entry["state"] != "gone"] == [name(3)]  # 0, 2 and 4 were replaced, 5 was not
        assert await pool.resize(1000, False) == 2
        assert await pool.fill(0, 2) == [name(3), name(7)]  # the next stage tries again: 6 is lost as well

    asyncio.run(scenario())


def test_one_that_is_given_back_before_it_is_up_is_no_loss(killed):
    gate = asyncio.Event()

    async def starting():
        await gate.wait()
        raise RayActorError(error_msg="it was killed")

    async def scenario():
        pool = make(1, [good, *[starting] * 9], most=5)
        await pool.fill(0)
        assert await pool.resize(500, True) == 5
        await settle()
        assert await pool.resize(100, True) == 1
        gate.set()
        await settle()
        return pool._stillborn, [m for m, entry in (await pool.status()).items() if entry["state"] != "gone"]

    assert asyncio.run(scenario()) == (0, [name(0)]) and len(killed) == 4


def test_no_generator_at_all_is_an_error_with_every_reason(killed):
    async def scenario():
        with pytest.raises(NoGenerators, match=f"no generator became ready: {name(0)}: did not start.*{name(1)}: did not start"):
            await make(2, [bad, never], start_timeout=0.02).fill(0, 2)

    asyncio.run(scenario())


def test_busy_seconds_are_those_with_a_lease_out(killed, clock):
    async def scenario():
        pool = await serving(2)
        clock.seconds += 5
        assert await pool.take_busy_seconds() == 0.0
        await pool.lease(0, 10, (), 1)
        clock.seconds += 2
        await pool.lease(0, 10, (), 1)  # overlaps: the union counts, not the sum
        clock.seconds += 3
        await pool.release(name(0), 10)
        clock.seconds += 1
        assert await pool.take_busy_seconds() == 6.0
        clock.seconds += 4
        await pool.release(name(1), 10)
        clock.seconds += 100
        assert await pool.take_busy_seconds() == 4.0
        assert await pool.take_busy_seconds() == 0.0
        await pool.lease(0, 10, (), 1)
        clock.seconds += 1
        await pool.report(name(0), "died")
        clock.seconds += 50
        assert await pool.take_busy_seconds() == 1.0

    asyncio.run(scenario())


@pytest.mark.parametrize(("rollouts", "each", "least", "most", "expected"), [
    (0, 100, 1, 4, 1), (1, 100, 1, 4, 1), (100, 100, 1, 4, 1), (101, 100, 1, 4, 2), (399, 100, 1, 4, 4), (10_000, 100, 1, 4, 4),
    (0, 100, 3, 4, 3), (250, 100, 3, 8, 3), (350, 100, 3, 8, 4), (350, 100, 3, 3, 3), (350, 1, 1, 64, 64)])
def test_how_many_generators_a_stage_deserves(rollouts, each, least, most, expected):
    assert generators_wanted(rollouts, each, least, most) == expected


def test_the_pool_grows_with_the_work_and_gives_back_only_when_told(killed):
    async def scenario():
        pool = await serving(1, most=4)
        await pool.lease(0, 10, (), 1)  # of a caller that died: nobody samples when a stage begins
        assert await pool.resize(250, False) == 3 and (await pool.status())[name(0)]["leases"] == 0 and await pool.fill(0, 3) == [name(1), name(2)]
        for one in (name(1), name(2)):
            await pool.serve(one, 0)
        assert await pool.resize(50, False) == 3 and killed == []  # kept warm
        assert await pool.resize(50, True) == 1
        assert killed == [name(2), name(1)]  # the newest first
        assert await pool.take_retired() == {name(2): "not needed", name(1): "not needed"}
        assert await pool.resize(10_000, True) == 4 and await pool.fill(0, 4) == [name(3), name(4), name(5)]
        assert name(1) not in await pool.status()  # whoever is gone is forgotten once that was reported

    asyncio.run(scenario())


def test_one_that_does_not_serve_yet_is_given_back_before_one_that_does(killed):
    async def scenario():
        pool = make(1, [good, never], most=2)
        await pool.serve((await pool.fill(0))[0], 0)
        await pool.resize(200, False)
        await pool.resize(0, True)

    asyncio.run(scenario())
    assert killed == [name(1)]


def test_a_lease_waits_for_room_and_goes_to_whoever_joins(killed):
    async def scenario():
        pool = await serving(1, most=2)
        await pool.resize(200, False)
        assert [(await pool.lease(0, 90, (), 1)).member for _ in range(2)] == [name(0)] * 2  # twice what it samples at once
        waiting = asyncio.create_task(pool.lease(0, 90, (), 5))
        assert await pool.joining(5) == [name(1)] and await pool.queue_depth() == 1 and not waiting.done()
        await pool.serve(name(1), 0)
        assert (await waiting).member == name(1) and await pool.queue_depth() == 0
        assert await pool.joining(0.01) == []
        assert (await pool.lease(0, 90, (), 1)).member == name(1)
        third = asyncio.create_task(pool.lease(0, 90, (), 5))
        await asyncio.sleep(0)
        await pool.release(name(0), 90)
        assert (await third).member == name(0)
        assert (await asyncio.gather(pool.lease(0, 10_000, (), 0.01), return_exceptions=True))[0].args[0].startswith("no generator came to")

    asyncio.run(scenario())


def test_more_rollouts_than_anyone_has_room_for_go_to_an_idle_one(killed):
    async def scenario():
        pool = await serving(1)
        assert (await pool.lease(0, 10_000, (), 1)).member == name(0)

    asyncio.run(scenario())


def test_the_avoided_is_not_leased_while_another_is_merely_full(killed):
    async def scenario():
        pool = await serving(2)
        for _ in range(2):
            await pool.lease(0, 100, (name(1),), 1)
        with pytest.raises(NoGenerators):
            await pool.lease(0, 100, (name(1),), 0.01)

    asyncio.run(scenario())


def test_a_generator_that_dies_idle_is_found_and_replaced(killed):
    async def scenario():
        pool = await serving(2)
        (await pool.members())[0].generator.life = bad
        await pool.look(5.0)
        assert await pool.joining(5) == [name(2)]
        assert (await pool.status())[name(0)]["reason"] == "died: no kernel for this CPU"

    asyncio.run(scenario())
    assert killed == [name(0)]


def test_one_that_does_not_answer_gets_nothing_new_and_is_replaced_in_the_end(killed):
    async def scenario():
        pool = await serving(2, lost_after=40.0)
        first = (await pool.members())[0].generator
        answer = asyncio.Event()
        first.life = answer.wait
        states = []
        for _ in range(4):
            await pool.look(5.0)
            await settle()
            states.append((await pool.status())[name(0)]["state"])
        assert states == ["serving", "serving", "serving", "suspect"]
        assert {(await pool.lease(0, 10, (), 1)).member for _ in range(3)} == {name(1)}
        assert [lease.member for lease in await pool.members()] == [name(1)]  # no push waits for it
        answer.set()
        await settle()
        await pool.look(5.0)
        assert (await pool.status())[name(0)]["state"] == "joining"  # it may have missed a push: it proves its weights again
        await pool.serve(name(0), 0)
        first.life = never
        for _ in range(11):
            await settle()
            await pool.look(5.0)
        assert (await pool.status())[name(0)]["reason"] == "did not answer for 45 s"

    asyncio.run(scenario())
    assert killed == [name(0)]


def test_a_push_that_a_suspect_took_makes_it_serve_and_one_at_work_takes_none(killed):
    """Taking weights keeps the loop that would answer busy: whoever proved them has answered."""
    async def scenario():
        pool = await serving(2, lost_after=40.0)
        silent = (await pool.members())[0].generator
        silent.life = never
        await pool.lease(0, 10, (), 1)
        for _ in range(4):
            await pool.look(5.0)
            await settle()
        assert (await pool.status())[name(0)]["state"] == "suspect"
        await pool.serve(name(0), 1)
        found = (await pool.status())[name(0)]
        assert (found["state"], found["version"]) == ("serving", 1)
        for _ in range(4):
            await pool.look(5.0)
            await settle()
        silent.life = good
        pool._members[name(0)].asked.cancel()
        await settle()
        assert [lease.member for lease in await pool.members()] == [name(0), name(1)]  # it answers again, so a push reaches it
        assert (await pool.status())[name(0)]["state"] == "joining" and await pool.joining(0.01) == []  # it still samples
        await pool.release(name(0), 10)
        assert await pool.joining(0.01) == [name(0)]

    asyncio.run(scenario())
    assert killed == []


def test_one_whose_engine_failed_is_replaced(killed):
    async def broken():
        raise RayTaskError("alive", "trace", EngineError("the engine failed earlier and must be replaced: out of memory"))

    async def scenario():
        pool = await serving(1)
        (await pool.members())[0].generator.life = broken
        await pool.look(5.0)
        await settle()
        assert (await pool.status())[name(0)]["reason"].startswith("broken: ") and await pool.joining(5) == [name(1)]

    asyncio.run(scenario())
    assert killed == [name(0)]


def test_one_whose_node_goes_finishes_what_it_has_and_is_replaced_at_once(killed):
    async def scenario():
        leaving = []
        pool = await serving(2, ready=[good, *[elsewhere] * 9], draining=lambda: leaving)
        lease = await pool.lease(0, 10, (), 1)
        leaving.append("here")
        await pool.look(5.0)
        assert (await pool.status())[name(0)]["state"] == "leaving" and killed == [] and await pool.joining(5) == [name(2)]
        assert [(await pool.lease(0, 10, (), 1)).member for _ in range(2)] == [name(1)] * 2
        await pool.release(lease.member, 10)
        assert killed == [name(0)] and (await pool.take_retired())[name(0)] == "its node is drained"
        leaving.append("elsewhere")
        await pool.release(name(1), 10)
        await pool.release(name(1), 10)
        await pool.look(5.0)
        assert killed == [name(0), name(1), name(2)]  # idle: at once

    asyncio.run(scenario())


def test_how_late_a_generators_loop_is_can_be_seen(killed):
    async def late():
        return 0.25

    async def scenario():
        pool = await serving(2)
        (await pool.members())[1].generator.life = late
        await pool.look(5.0)
        await settle()
        return (await pool.status())[name(1)]["lag"]

    assert asyncio.run(scenario()) == 0.25
