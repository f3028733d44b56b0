"""Collective calls from two threads reach every learner rank in one order."""

import threading
import time
from types import SimpleNamespace

from actors.gang import LearnerGang


class Rank:
    def __init__(self):
        self.got = []
        for name in ("accumulate", "send_weights"):
            setattr(self, name, SimpleNamespace(remote=lambda *args, name=name: self._take(name)))

    def _take(self, name):
        self.got.append(name)
        time.sleep(1e-4)  # lets the other thread in


def test_two_threads_do_not_interleave_their_calls_differently_on_two_ranks():
    gang = LearnerGang.__new__(LearnerGang)
    gang._order, gang.ranks = threading.Lock(), [Rank(), Rank(), Rank()]
    threads = [threading.Thread(target=lambda name=name: [gang.call(name) for _ in range(50)]) for name in ("accumulate", "send_weights")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = [rank.got for rank in gang.ranks]
    assert len(first) == 100 and all(other == first for other in others)
