"""What happened when: spans of time that every process keeps, put together in Chrome's trace format (https://ui.perfetto.dev opens it).

    timeline = Timeline("rtpo-generator-0")
    with timeline.span("receive weights", version=3):
        ...
    chrome_trace(timeline.take() + spans_of_the_others)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

KEPT = 20_000  # spans that a process keeps until they are taken; older ones are dropped


class Span(NamedTuple):
    """One thing that took time. Spans of one lane nest or follow each other; what overlaps needs lanes of its own, or `flight`."""

    process: str
    lane: str
    name: str
    start: float  # seconds since the epoch
    end: float
    flight: bool = False  # one of many under way at once, such as episodes
    details: dict[str, Any] = {}  # JSON-like; never changed


class Timeline:
    """Args:
    process: whose spans these are.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._spans: deque[Span] = deque(maxlen=KEPT)

    @contextmanager
    def span(self, name: str, lane: str = "", *, flight: bool = False, **details: Any) -> Iterator[None]:
        """Keep what the block takes, also when it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), lane, flight=flight, **details)

    def add(self, name: str, start: float, end: float, lane: str = "", *, flight: bool = False, **details: Any) -> None:
        """Keep what is over, in seconds since the epoch."""
        self._spans.append(Span(self._process, lane or name, name, start, end, flight, details))

    def take(self) -> list[Span]:
        """All spans that were kept since the last call."""
        taken = list(self._spans)
        self._spans.clear()
        return taken


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """As a JSON object: one process a track, one lane a thread, times in microseconds."""
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    for number, span in enumerate(sorted(spans, key=lambda s: (s.start, -s.end))):
        pid = processes.setdefault(span.process, len(processes) + 1)
        tid = lanes.setdefault((span.process, span.lane), len(lanes) + 1)
        common = {"name": span.name, "cat": span.lane, "pid": pid, "tid": tid, "args": span.details}
        start, end = span.start * 1e6, span.end * 1e6
        if span.flight:
            events += [{**common, "ph": "b", "id": number, "ts": start}, {**common, "ph": "e", "id": number, "ts": end}]
        else:
            events.append({**common, "ph": "X", "ts": start, "dur": end - start})
    named = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for name, pid in processes.items()]
    named += [{"ph": "M", "name": "thread_name", "pid": processes[process], "tid": tid, "args": {"name": lane}}
              for (process, lane), tid in lanes.items()]
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms"}
