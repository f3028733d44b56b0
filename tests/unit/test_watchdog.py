"""The driver's watch over the coordinator, on a coordinator and a stream that are plain objects."""

import logging
from types import SimpleNamespace

import pytest

from actors import watchdog
from rtpo_ray.errors import CoordinatorLost

QUIET = object()  # a look at which there is no event


class World:
    """Time goes by in looks of one second. `script`: what the stream has at each look; `answers`: what the coordinator says at each
    look (None: nothing yet); the last answer is repeated."""

    def __init__(self, script, answers, pool):
        self.script, self.answers, self.pool_answers, self.looks = list(script), list(answers), list(pool), 0

    def wait(self, refs, timeout, **options):
        if refs == ["pool"]:
            return ([] if self.pool_answers[min(self.looks, len(self.pool_answers)) - 1] is None else refs), []
        if refs == [self]:
            self.looks += 1
            assert self.looks < 1000, "it waits for ever"
            ready = not self.script or self.script[0] is not QUIET
            if not ready:
                self.script.pop(0)
            return (refs if ready else []), []
        return ([] if self.said() is None else refs), []

    def get(self, ref, timeout):
        if ref == "pool":
            return 0
        if isinstance(self.said(), Exception):
            raise self.said()
        return self.said()

    def said(self):
        return self.answers[min(self.looks, len(self.answers)) - 1]

    def __next__(self):
        if not self.script:
            raise StopIteration
        return self.script.pop(0)


@pytest.fixture
def watch(monkeypatch):
    def run(script, answers, pool=(0,), start=0):
        world = World(script, answers, pool)
        monkeypatch.setattr(watchdog, "ray", SimpleNamespace(wait=world.wait, get=world.get))
        monkeypatch.setattr(watchdog, "Asking", lambda: lambda: "pool")
        coordinator = SimpleNamespace(doing=SimpleNamespace(remote=lambda: "asked"))
        return watchdog.watched(coordinator, world, lost_after=3, stuck_after=10, start=start, period=1, tell=4)
    return run


def test_events_come_through_in_order_and_the_end_ends(watch):
    assert list(watch([1, 2, QUIET, QUIET, 3], [("work", 1)])) == [1, 2, 3]


def test_one_that_does_not_answer_is_lost_and_what_it_said_last_is_told(watch):
    stream = watch([1, *[QUIET] * 20], [("x", 0), ("sweep 2, turn 1: sampling", 1), None])
    assert next(stream) == 1
    with pytest.raises(CoordinatorLost, match=r"the coordinator did not answer for 3 s; the last .* said: sweep 2, turn 1: sampling"):
        next(stream)


def test_a_pool_that_does_not_answer_is_the_coordinators_loss_too(watch):
    with pytest.raises(CoordinatorLost, match=r"the generator pool did not answer for 3 s; the last that the coordinator said: sweep 1, trunks"):
        list(watch([QUIET] * 9, [("sweep 1, trunks", 1)], pool=[0, 0, None]))
    assert list(watch([*[QUIET] * 9, 5], [("sweep 1, trunks", 1)], pool=[None, None, 0] * 4)) == [5]


def test_silence_that_ends_in_time_is_forgiven(watch):
    answers = [("a", 0), None, None, ("a", 1), None, None, ("a", 2), None, None, ("a", 3)]
    assert list(watch([*[QUIET] * 12, 7], answers)) == [7]


def test_an_event_ends_a_silence(watch):
    assert list(watch([QUIET, QUIET, 1, QUIET, QUIET, 2, QUIET, QUIET, 3], [None])) == [1, 2, 3]


def test_one_that_answers_and_does_not_get_on_is_lost(watch):
    with pytest.raises(CoordinatorLost, match=r"it was stuck for 11 s: sweep 0, turn 2: the learner's update"):
        list(watch([QUIET] * 20, [("sweep 0, turn 2: the learner's update", seconds) for seconds in range(30)]))


def test_a_long_step_is_told_again_and_again(watch, caplog):
    with caplog.at_level(logging.WARNING):
        answers = [*(("trunks", seconds) for seconds in range(9)), *(("update", seconds) for seconds in range(6))]
        assert list(watch([*[QUIET] * 15, 1], answers)) == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "still at work for 4 s: trunks", "still at work for 8 s: trunks", "still at work for 4 s: update"]


def test_what_kills_it_comes_out(watch):
    with pytest.raises(OSError, match="it died"):
        list(watch([QUIET] * 9, [OSError("it died")]))


def test_starting_may_take_longer_than_an_answer(watch):
    assert list(watch([*[QUIET] * 9, 1, QUIET], [*[None] * 6, ("a", 0)], start=8)) == [1]
    with pytest.raises(CoordinatorLost, match="the coordinator did not answer for 8 s; the last that the coordinator said: starting"):
        list(watch([QUIET] * 20, [None], start=8))
    with pytest.raises(CoordinatorLost, match="the coordinator did not answer for 3 s"):
        list(watch([QUIET] * 20, [None, ("a", 0), None], start=8))
