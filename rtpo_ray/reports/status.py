"""Where a run stands, in words, out of its ledger."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rtpo_ray.ledger import Ledger


def status_lines(ledger: Ledger) -> Iterator[str]:
    """What is done, how it goes, and how long ago the last step ended."""
    at, events = ledger.progress, ledger.events()
    where = "finished" if at.finished else f"sweep {at.sweep + 1} under way, " + ("no stage done" if at.stage <= 0 else f"{at.stage} stages done")
    yield f"{where}; weights v{at.version}, {at.updates} updates, {at.tokens:,} generated tokens"
    last = {event["kind"]: event for event in events}
    if "eval" in last and last["eval"]["success"] is not None:
        yield f"success {100 * last['eval']['success']:.1f} % on {last['eval']['tasks']} held-out tasks after {last['eval']['sweep']} sweeps"
    if "stage" in last and last["stage"]["success"] is not None:
        stage = last["stage"]
        turn = "all turns" if stage["turn"] is None else f"turn {stage['turn']}"
        yield (f"last stage: sweep {stage['sweep'] + 1}, {turn}: success {100 * stage['success']:.1f} %, equal "
               f"{100 * stage['zero_advantage_rate']:.1f} %, {stage['seconds']['total']:.1f} s")
    lost, resumed = sum(sum(event.get("failed", {}).values()) for event in events), sum(event["kind"] == "resume" for event in events)
    yield f"{lost} rollouts lost, {sum(len(event.get('retired', {})) for event in events)} generators retired, resumed {resumed} times"
    if events:
        yield f"last step ended {time.time() - events[-1]['time']:.0f} s ago"
