"""A worker that asks math-verify, run as a script by `pool`: it imports nothing of the project.

Its file descriptor is the first argument. It sends "ready" when warm. A request is the JSON of {gold, answer, seconds}; the replies are
"gold" when the gold could be parsed ("no gold" when not, and then nothing else), and "right" or "wrong". Both steps have `seconds` of the
worker's own processor time, so a busy machine makes no right answer wrong; the kernel ends the process that takes longer, even in the
middle of one huge power, where Python would not look at a signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 4 << 30  # bytes of address space; beyond them Python raises MemoryError, which makes an answer wrong and a gold unusable
WARM = [(r"\frac{1}{2}", "0.5"), ("(1,2]", r"1<x\le 2"), (r"\{1,2\}", "2,1"), ("x=5", "5"), (r"\sqrt{8}", r"2\sqrt{2}"), ("x^2-1", "(x-1)(x+1)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), (r"\sin x", r"\cos x"), (r"\log 2", r"90^\circ")]


def parse(text: str) -> list[Any]:
    """What `text`, LaTeX without delimiters, may mean to math-verify; empty when nothing."""
    import math_verify

    # Only as LaTeX: the default also looks for any plain number where that fails, and so takes "5 or 6?" for 6.
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    return list(math_verify.parse("\\boxed{" + text + "}", config, fallback_mode="no_fallback", parsing_timeout=None))


def same(gold: list[Any], answer: list[Any]) -> bool:
    """Whether `answer` means `gold`. A set of numbers and the inequality that describes it are the same, whichever is the gold."""
    import math_verify

    return bool(math_verify.verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def serve(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    for gold, answer in WARM:
        same(parse(gold), parse(answer))
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _answer(connection, **json.loads(connection.recv_bytes()))


def _answer(connection: Connection, gold: str, answer: str, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if meaning := parse(gold):
        connection.send_bytes(b"gold")
        signal.setitimer(signal.ITIMER_PROF, seconds)
        verdict = b"right" if same(meaning, parse(answer)) else b"wrong"
    else:
        verdict = b"no gold"
    signal.setitimer(signal.ITIMER_PROF, 0)
    connection.send_bytes(verdict)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
