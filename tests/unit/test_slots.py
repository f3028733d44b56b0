"""Who is let in next, and what is counted of it, with a clock that the test moves."""

import asyncio

import pytest

from actors import slots
from actors.slots import Occupancy, Slots
from rtpo_ray.timeline import Timeline


def test_the_lowest_rank_is_next_and_equals_come_in_turn():
    order = []

    async def visit(made, name, rank, stay):
        async with made.held(rank):
            order.append(name)
            await stay.wait()

    async def scenario():
        made, stay = Slots(1), asyncio.Event()
        visits = [asyncio.create_task(visit(made, name, rank, stay)) for name, rank in
                  (("b", (2.0,)), ("a", (1.0,)), ("c", (2.0,)), ("z", (9.0,)))]
        await asyncio.sleep(0.01)
        assert order == ["a"]
        stay.set()
        await asyncio.gather(*visits)

    asyncio.run(scenario())
    assert order == ["a", "b", "c", "z"]


def test_who_gives_a_place_back_and_comes_again_at_once_is_ranked_with_those_who_wait():
    order = []

    async def twice(made):
        for _ in range(2):
            async with made.held((0.0,)):
                order.append("twice")
                await asyncio.sleep(0)

    async def once(made):
        async with made.held((1.0,)):
            order.append("once")

    async def scenario():
        made = Slots(1)
        await asyncio.gather(twice(made), once(made))

    asyncio.run(scenario())
    assert order == ["twice", "twice", "once"]


@pytest.mark.parametrize("turns", range(4))
def test_a_place_survives_whoever_is_cancelled_while_it_waits(turns):
    async def scenario():
        made, leave = Slots(1), asyncio.Event()

        async def stay():
            async with made.held((0.0,)):
                await leave.wait()

        first = asyncio.create_task(stay())
        await asyncio.sleep(0.01)
        doomed, last = asyncio.create_task(stay()), asyncio.create_task(stay())
        await asyncio.sleep(0)
        leave.set()
        for _ in range(turns):  # also in the turn in which it was let in
            await asyncio.sleep(0)
        doomed.cancel()
        await asyncio.wait_for(asyncio.gather(first, last), 5)
        await asyncio.gather(doomed, return_exceptions=True)
        async with asyncio.timeout(5):
            async with made.held((0.0,)):
                return made._free

    assert asyncio.run(scenario()) == 0


def test_occupancy_by_hand(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(slots.time, "monotonic", lambda: now[0])
    timeline = Timeline("g")
    made = Occupancy(2, timeline)
    for seconds, open_change, run_change in ((5.0, 3, 0), (1.0, 0, 2), (2.0, 0, -1), (4.0, -2, 0), (3.0, 0, -1), (1.0, -1, 0), (7.0, 0, 0)):
        now[0] += seconds  # with what was there before the changes
        made.open(open_change)
        made.run(run_change)
    # open: 0 for 5 s, 3 for 7 s, 1 for 4 s, 0 for 7 s; running: 0 for 6 s, 2 for 2 s, 1 for 7 s, 0 from then on
    assert made.take() == {"slots": 2, "slot_seconds": 2 * 2 + 7, "open_seconds": 11, "demand_seconds": 2 * 7 + 4}
    assert made.take() == {"slots": 2, "slot_seconds": 0, "open_seconds": 0, "demand_seconds": 0}
