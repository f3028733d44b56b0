"""A sandbox for Python code that a model wrote: sessions, each a confined process that keeps its names from cell to cell.

    session = Session(memory=512, output=10_000)
    session.run("x = 6 * 7", seconds=10)
    session.run("x", seconds=10)          # "42"

The sessions of a process are forked from one warm process, the zygote (`rtpo_ray.tools.zygote`), which starts with the first and is never a
fork of the caller. Nothing that comes from a session is trusted: it is text of limited length that must come in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rtpo_ray.errors import SandboxError

ESSENTIAL = ("rlimits", "capabilities", "landlock", "seccomp")  # the others are a second wall behind these
START_SECONDS = 60.0  # for the zygote, which imports sympy, and for a session
CPU_SECONDS = 3600  # of a session's whole life
_STATUS_SECONDS = 0.5  # how long to wait for the word how a session ended
_GRACE_SECONDS = 2.0  # for the zygote to end
_NONCE = 16  # bytes
_OUT_OF_MEMORY = 99  # a session's exit code
_PER_CHARACTER = 4  # bytes of UTF-8 at most
_CUT_NOTE = 64  # characters that an output may have beyond its limit


class SessionEnded(Exception):
    """The cell ended its session; the text says how, for the model to read."""


def layers() -> dict[str, str]:
    """What confines the sessions on this machine, by layer: "active", or why it is not. Starts the zygote. Raises SandboxError when it
    does not start."""
    return {name: reason or "active" for name, reason in _zygote().layers.items()}


class Session:
    """A confined interpreter. It ends with `close`, with the object, or with this process.

    Args:
        memory: MiB that it may take beyond what the loaded packages need.
        output: characters kept of a cell's output; the middle of a longer one is cut.
        isolation: "require" refuses to run without every essential layer, "best-effort" runs with those that the machine has.
        cpu: seconds of CPU time for all of its cells.

    Raises SandboxError when an essential layer is missing, or when no session can be started.
    """

    def __init__(self, memory: int, output: int, isolation: str = "require", cpu: int = CPU_SECONDS) -> None:
        self._ends: tuple[socket.socket, ...] = ()
        self._owner, self._memory, self._output = os.getpid(), memory, output
        request = json.dumps({"memory": memory << 20, "cpu": cpu, "output": output}).encode()
        if not self._start(request, isolation) and not self._start(request, isolation):  # the second time in a new zygote
            raise SandboxError("no session of the sandbox started: its zygote died twice")

    def __del__(self) -> None:
        self.close()

    def run(self, code: str, seconds: float) -> str:
        """Run a cell.

        Args:
            code: Python, as in a notebook.
            seconds: of wall-clock time, after which the session is killed.

        Returns:
            what it printed, the value of its last expression, or the traceback of what it raised.

        Raises SessionEnded when the session did not survive the cell; it cannot be used again.
        """
        try:
            return self._ask(code, time.monotonic() + seconds)
        except TimeoutError:
            reason = f"the code ran longer than {seconds:g} s and was stopped"
        except _ForgedReply:
            reason = "the code wrote to the sandbox's own connection and was stopped"
        except OSError:
            reason = self._how_it_ended()
        self.close()
        raise SessionEnded(reason)

    def close(self) -> None:
        """Kill the session. May be called twice, and from any thread."""
        if os.getpid() == self._owner:  # a fork of this process has copies of the sockets, but no say
            for end in self._ends:
                with contextlib.suppress(OSError):  # already closed
                    end.shutdown(socket.SHUT_RDWR)  # holds even where a fork still has a copy
                end.close()

    def _start(self, request: bytes, isolation: str) -> bool:
        """Whether there is a session now; not if the zygote has died."""
        zygote = _zygote()
        if isolation == "require":
            _refuse_without_essential(zygote.layers)
        try:
            self._ends = zygote.fork(request)
            self._receive(time.monotonic() + START_SECONDS)
            return True
        except TimeoutError as error:
            zygote.stop()
            raise SandboxError(f"a session of the sandbox did not start in {START_SECONDS:g} s") from error
        except OSError as error:
            reason = self._last_word() if self._ends else b""
            self.close()
            if reason:
                raise SandboxError(f"a session of the sandbox did not start: {reason.decode()}") from error
            zygote.stop()
            return False

    def _ask(self, code: str, deadline: float) -> str:
        nonce = secrets.token_bytes(_NONCE)
        payload = nonce + code.encode("utf-8", "surrogatepass")
        self._ends[0].settimeout(deadline - time.monotonic())
        self._ends[0].sendall(struct.pack(">I", len(payload)) + payload)
        reply = self._receive(deadline)
        text = reply[_NONCE:].decode("utf-8", "replace")
        if reply[:_NONCE] != nonce or len(text) > self._output + _CUT_NOTE:
            raise _ForgedReply
        return text

    def _receive(self, deadline: float) -> bytes:
        """A frame: 4 bytes of length, then the payload, at most what a reply may have. Raises TimeoutError, ConnectionError, _ForgedReply."""
        (size,) = struct.unpack(">I", self._exactly(4, deadline))
        if size > _NONCE + _PER_CHARACTER * (self._output + _CUT_NOTE):
            raise _ForgedReply
        return self._exactly(size, deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        channel, data = self._ends[0], b""
        while len(data) < size:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            channel.settimeout(left)
            part = channel.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    def _how_it_ended(self) -> str:
        word = self._last_word()
        if not word.isdigit():
            return "the code closed the sandbox's own connection and was stopped" if word else "the session was ended from outside"
        code = os.waitstatus_to_exitcode(int(word))
        if code == _OUT_OF_MEMORY:
            return f"the code took more than {self._memory} MiB of memory and was stopped"
        if code == -signal.SIGKILL:
            return "the code was killed, for too much memory or CPU time"
        if code >= 0:
            return f"the code ended the interpreter with exit code {code}"
        return f"the code crashed the interpreter ({signal.Signals(-code).name})"

    def _last_word(self) -> bytes:
        """What the zygote says of the session's end: a wait status or why it did not start; empty when the zygote died as well, "?" when
        the session goes on."""
        try:
            self._ends[1].settimeout(_STATUS_SECONDS)
            return self._ends[1].recv(1000)
        except TimeoutError:
            return b"?"
        except OSError:  # already closed here
            return b""


class _ForgedReply(Exception):
    """What came through the channel is no answer to the call."""


class _Zygote:
    """The warm process. Raises SandboxError when it does not start.

    Attributes:
        layers: that confine it and its sessions; empty, or why a layer is missing.
        owner: the process that started it.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                     "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-m", "rtpo_ray.tools.zygote", str(theirs.fileno())]
        with tempfile.TemporaryFile() as errors, theirs:
            self._process = subprocess.Popen(command, env=variables, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                                             pass_fds=(theirs.fileno(),), start_new_session=True)
            theirs.close()
            self._control.settimeout(START_SECONDS)
            try:
                greeting = self._control.recv(1 << 16)
            except TimeoutError:
                greeting = b""
            if not greeting:
                self.stop()
                errors.seek(0)
                raise SandboxError(f"the sandbox's zygote did not start in {START_SECONDS:g} s: {' '.join(command)}: "
                                   f"{errors.read()[-2000:].decode(errors='replace').strip() or 'no message'}")
        self.layers: dict[str, str] = json.loads(greeting)["layers"]

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(self, request: bytes) -> tuple[socket.socket, socket.socket]:
        """The channel and the status of a new session. Raises OSError when the zygote is gone."""
        channel, its_channel = socket.socketpair()
        status, its_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_channel, its_status:
            socket.send_fds(self._control, [request], [its_channel.fileno(), its_status.fileno()])
        return channel, status

    def stop(self) -> None:
        """End it and all of its sessions."""
        with contextlib.suppress(OSError):  # it is gone, or was stopped before
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_GRACE_SECONDS)  # so that it ends and reaps the others itself
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_GRACE_SECONDS)


_current: _Zygote | None = None
_lock = threading.Lock()


def _zygote() -> _Zygote:
    """This process's, started when there is none."""
    global _current
    with _lock:
        if _current is None or not _current.alive:
            _current = _Zygote()
        return _current


def _refuse_without_essential(found: dict[str, str]) -> None:
    if missing := [f"{name} ({found[name]})" for name in ESSENTIAL if found[name]]:
        raise SandboxError(f"this machine cannot confine Python code; missing: {', '.join(missing)}. Use Linux 5.13 or later on x86_64 with "
                           "Landlock enabled, or give the tool isolation='best-effort' to run with the other layers only")
