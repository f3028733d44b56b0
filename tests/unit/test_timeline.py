"""Spans, and the trace that a viewer opens."""

import pytest

from rtpo_ray.timeline import KEPT, Span, Timeline, chrome_trace


def test_spans_are_taken_once_and_kept_when_the_block_raises():
    timeline = Timeline("rtpo-learner-0")
    with pytest.raises(KeyError), timeline.span("update", turn=2):
        raise KeyError
    timeline.add("probe", 5.0, 6.5, lane="weights")
    (update, probe), nothing = timeline.take(), timeline.take()
    assert (update.process, update.lane, update.name, update.details, nothing) == ("rtpo-learner-0", "update", "update", {"turn": 2}, [])
    assert update.end >= update.start and probe == Span("rtpo-learner-0", "weights", "probe", 5.0, 6.5)


def test_the_oldest_spans_make_room():
    timeline = Timeline("p")
    for number in range(KEPT + 3):
        timeline.add("step", float(number), number + 0.5)
    taken = timeline.take()
    assert (len(taken), taken[0].start) == (KEPT, 3.0)


def test_the_trace_has_a_track_a_process_a_lane_a_thread_and_microseconds():
    spans = [Span("g", "episodes", "t/0", 2.0, 3.0, True, {"turn": 1}), Span("c", "stage", "turn 1", 1.0, 4.0),
             Span("g", "weights", "receive", 0.5, 1.0)]
    trace = chrome_trace(spans)["traceEvents"]
    names = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in trace if e["ph"] == "M"}
    assert names == {("process_name", 1, None): "g", ("process_name", 2, None): "c", ("thread_name", 1, 1): "weights",
                     ("thread_name", 2, 2): "stage", ("thread_name", 1, 3): "episodes"}
    assert [(e["ph"], e["name"], e["ts"], e.get("dur")) for e in trace if e["ph"] != "M"] == [
        ("X", "receive", 0.5e6, 0.5e6), ("X", "turn 1", 1e6, 3e6), ("b", "t/0", 2e6, None), ("e", "t/0", 3e6, None)]
    assert {e["id"] for e in trace if e["ph"] in "be"} == {2} and [e["args"] for e in trace if e["ph"] == "b"] == [{"turn": 1}]
