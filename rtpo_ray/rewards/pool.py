"""math-verify in warm processes that can be killed. One pool a process, started when it is first needed.

math-verify cannot be called where graders run: its own timeouts work in a process's main thread only, a cold first call can overrun them and
make a right answer wrong, and no signal handler of Python interrupts one huge power. The workers are fresh interpreters, never forks of the
caller, which may have threads; they are warm before they count as ready, and one that is ended is replaced at once.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

from rtpo_ray.errors import GraderError

PATIENCE = 120.0  # seconds of the clock that one verdict may take in all: a free worker, its start, its processor time on a busy machine
_WORKER = Path(__file__).with_name("verifier.py")


class Overrun(Exception):
    """The answer could not be evaluated in its seconds, though its gold could."""


class _Died(Exception):
    """The worker ended, though not for having overrun its time."""


class _TooSlow(Exception):
    """The worker used its processor time up."""


class _Worker:
    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # -P: the folder of the worker's file, which holds another math.py, is no place to import from.
        command = [sys.executable, "-P", str(_WORKER), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
                                            stdout=subprocess.DEVNULL, start_new_session=True)
        self._ready = False

    def ask(self, gold: str, answer: str, seconds: float, deadline: float) -> bool:
        """Whether `answer` means `gold`. Raises GraderError for a gold that cannot be parsed, _Died, _TooSlow or TimeoutError; after all but
        the first the worker is of no more use."""
        gold_parsed = False
        try:
            if not self._ready:
                self._receive(deadline)
                self._ready = True
            self._connection.send_bytes(json.dumps({"gold": gold, "answer": answer, "seconds": seconds}).encode())
            gold_parsed = self._receive(deadline) == b"gold"
            verdict = self._receive(deadline) if gold_parsed else b""
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            if (status := self.process.wait(timeout=PATIENCE)) != -signal.SIGPROF:
                raise _Died(f"exit status {status}") from error
            if not gold_parsed:
                raise GraderError(f"the right answer {gold!r} could not be parsed within {seconds:g} s of processor time") from error
            raise _TooSlow from error
        if not gold_parsed:
            raise GraderError(f"the right answer {gold!r} is no mathematics that math-verify can parse")
        return verdict == b"right"

    def kill(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait(timeout=PATIENCE)

    def _receive(self, deadline: float) -> bytes:
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return self._connection.recv_bytes()


class Pool:
    """Workers that threads borrow, at most as many as the greediest of them allows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()

    def same(self, gold: str, answer: str, *, seconds: float, size: int) -> bool:
        """What math-verify says: whether `answer` means `gold`, both LaTeX without delimiters.

        Args:
            seconds: of processor time for the gold, and as many for the answer and the comparison.
            size: workers that the pool may have.

        Raises:
            Overrun: the answer took longer, and the gold is not to blame: comparing it with 1 took less.
            GraderError: the gold cannot be parsed or took longer, a worker died and another one too, or PATIENCE is over.
        """
        deadline = time.monotonic() + PATIENCE
        try:
            return self._ask(gold, answer, seconds, size, deadline)
        except _TooSlow as error:
            try:
                self._ask(gold, "1", seconds, size, deadline)
            except _TooSlow:
                raise GraderError(f"the right answer {gold!r} could not be evaluated within {seconds:g} s of processor time") from error
            raise Overrun from error

    def close(self) -> None:
        """End the workers, also those at work."""
        with self._changed:
            workers, self._workers, self._idle = self._workers, set(), []
        for worker in workers:
            worker.kill()

    def _ask(self, gold: str, answer: str, seconds: float, size: int, deadline: float) -> bool:
        for retried in (False, True):
            worker = self._take(size, deadline)
            usable = False
            try:
                verdict = worker.ask(gold, answer, seconds, deadline)
                usable = True
                return verdict
            except GraderError:
                usable = worker.process.poll() is None
                raise
            except TimeoutError as error:
                raise GraderError(f"no verdict on {answer!r} against {gold!r} within {PATIENCE:g} s; the machine is too busy") from error
            except _Died as error:
                if retried:
                    raise GraderError(f"two workers in a row died on {answer!r} against {gold!r}: {error}; math-verify must be installed "
                                      "and the machine have memory") from error
            finally:
                self._give(worker, usable)
        raise AssertionError("unreachable")

    def _take(self, size: int, deadline: float) -> _Worker:
        """A worker that is alive, perhaps not ready yet."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or len(self._workers) < size, deadline - time.monotonic()):
                raise GraderError(f"none of {len(self._workers)} workers was free within {PATIENCE:g} s; raise the option workers")
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                self._workers.discard(worker)
                worker.kill()
            return self._start()

    def _give(self, worker: _Worker, usable: bool) -> None:
        if not usable:
            worker.kill()
        with self._changed:
            if worker in self._workers:  # else the pool was closed meanwhile
                if usable:
                    self._idle.append(worker)
                else:
                    self._workers.discard(worker)
                    self._idle.insert(0, self._start())  # the last to be taken, since it is not ready
            self._changed.notify()

    def _start(self) -> _Worker:
        worker = _Worker()
        self._workers.add(worker)
        return worker


_shared = Pool()


def shared() -> Pool:
    """The pool of this process."""
    return _shared


def _renew() -> None:
    global _shared
    _shared = Pool()


os.register_at_fork(after_in_child=_renew)  # the workers are the parent's
atexit.register(lambda: _shared.close())
