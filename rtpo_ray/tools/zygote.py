"""The program that the sandbox runs: a process with numpy and sympy loaded and all doors closed, which forks one child a session.

    python -m rtpo_ray.tools.zygote CONTROL

CONTROL is the descriptor of a SOCK_SEQPACKET socket. It says once which layers confine it, {"layers": {name: "" or why not}}, and then takes
requests {"memory": bytes, "cpu": seconds, "output": characters}, each with two sockets: the channel that the session's cells and outputs go
through, and the status, on which the zygote says how the session ended. Whoever shuts the status down has the session killed. The end of
CONTROL ends the zygote and every session.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable
from os import read, write
from typing import Any, NoReturn

from rtpo_ray.tools import confine
from rtpo_ray.tools.cells import Notebook

PACKAGES = ("numpy", "numpy.random", "numpy.fft", "numpy.polynomial", "sympy")  # where installed; nothing else but the standard library
_SKIPPED = {"readline", "_tkinter", "_curses", "_curses_panel", "nis", "ossaudiodev"}  # want a terminal, a display or a network
_CHANNEL, _STATUS = 3, 4  # a session's descriptors; 0 to 2 are /dev/null
_NONCE = 16  # bytes
OUT_OF_MEMORY = 99  # exit code
_PAGE = resource.getpagesize()


def main() -> None:
    if confine.fix_addresses():
        os.execv(sys.executable, sys.orig_argv)
    control = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # rather this than the process that trains
    missing = confine.enter_namespaces()
    if not missing["pid"]:
        _become_first_process(control)
    layers = {f"{name} namespace": reason for name, reason in missing.items()}
    readable, listable = _load()
    base = _address_space()
    layers["hidden files"] = missing["mount"] or _tried(confine.hide_files, readable)
    layers["capabilities"] = _tried(confine.drop_capabilities)
    layers["landlock"] = _tried(confine.landlock, readable, listable)
    layers["rlimits"], layers["seccomp"] = "", _probe_seccomp()
    control.send(json.dumps({"layers": layers}).encode())
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # two descriptors a session
    gc.collect()
    gc.freeze()  # so that a session's collector does not copy every page
    _serve(control, base, not layers["seccomp"])


def _become_first_process(control: socket.socket) -> None:
    """Go on as process 1 of the new namespace, with which the kernel ends everything in it; the old process only waits."""
    if first := os.fork():
        control.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    confine.die_with_parent()


def _load() -> tuple[list[str], list[str]]:
    """Import what sessions may use.

    Returns:
        what they may read from then on: the standard library's files and the loaded packages; and folders that they may only list.
    """
    before = set(sys.modules)
    for name in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    standard = list(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
    dynamic = [folder for folder in (os.path.join(path, "lib-dynload") for path in standard) if folder in sys.path]
    for file in (file for folder in dynamic for file in sorted(os.listdir(folder))):  # later their shared libraries are out of sight
        name = file.partition(".")[0]
        if name not in _SKIPPED and "test" not in name and not name.startswith("xx"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    files = [getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before]
    packages = {os.path.join(entry, file[len(entry) + 1:].split(os.sep)[0]) for entry in sys.path if entry not in (*standard, *dynamic)
                for file in files if entry and file.startswith(entry + os.sep)}
    libraries = [os.path.join(path, name) for path in standard for name in os.listdir(path) if name not in ("site-packages", "dist-packages")]
    sys.path[:] = [*standard, *dynamic]
    sys.argv[:] = [""]
    os.environ.pop("PYTHONPATH", None)
    readable = [*libraries, *packages, *(f"{package}.libs" for package in packages)]
    return sorted(path for path in readable if os.path.exists(path)), standard


def _address_space() -> int:
    """Bytes in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * _PAGE


def _tried(layer: Callable[..., None], *arguments: Any) -> str:
    """Empty when the layer holds; otherwise why it does not."""
    try:
        layer(*arguments)
    except OSError as error:
        return str(error) or repr(error)
    return ""


def _probe_seccomp() -> str:
    """Whether a session will be able to install its filter, tried in a child; empty when it will."""
    ours, theirs = os.pipe()
    if child := os.fork():
        os.close(theirs)
        with open(ours, errors="replace") as file:
            reason = file.read()
        status = os.waitpid(child, 0)[1]
        return reason or ("" if status == 0 else f"the filter kills its process, status {status}")
    reason = _tried(confine.seccomp)
    write(theirs, reason.encode())
    os._exit(0)


def _serve(control: socket.socket, base: int, filtered: bool) -> NoReturn:
    """Fork sessions, kill those whose status is shut down, and reap them, until the control socket ends."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, tuple[int, socket.socket]] = {}  # by handle (pidfd): process and status
    handles: dict[int, int] = {}  # by the status's descriptor
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        for descriptor in ready:
            if descriptor in handles:
                signal.pidfd_send_signal(handles.pop(descriptor), signal.SIGKILL)
                poll.unregister(descriptor)
            elif descriptor in children:
                process, status = children.pop(descriptor)
                _, code = os.waitpid(process, 0)
                with status, contextlib.suppress(OSError):  # whoever shut it down asks no more
                    if handles.pop(status.fileno(), None) is not None:
                        poll.unregister(status)
                    status.send(str(code).encode())
                poll.unregister(descriptor)
                os.close(descriptor)
        if control.fileno() in ready:  # after the others: a descriptor closed above may come back here under the same number
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
            if not message:
                os._exit(0)
            channel, status = (socket.socket(fileno=descriptor) for descriptor in descriptors)
            try:
                process = _fork(json.loads(message), channel, status, base, filtered)
            except OSError as error:  # no memory, no process numbers: this session fails, the others go on
                status.send(str(error).encode())
                status.close()
                continue
            finally:
                channel.close()
            handle = os.pidfd_open(process)
            children[handle], handles[status.fileno()] = (process, status), handle
            poll.register(handle, select.POLLIN)
            poll.register(status, 0)


def _fork(limits: dict[str, int], channel: socket.socket, status: socket.socket, base: int, filtered: bool) -> int:
    """The child's process number; in the child it does not return."""
    if child := os.fork():
        return child
    try:
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (channel, status)]  # out of the way of the numbers that they get
        for end, number in (*zip(high, (_CHANNEL, _STATUS), strict=True), (0, 1), (0, 2)):
            os.dup2(end, number, inheritable=False)
        os.closerange(_STATUS + 1, 1 << 30)
        try:
            confine.die_with_parent()
            _limit(base + limits["memory"], limits["cpu"])
            notebook = Notebook(limits["output"])
            if filtered:
                confine.seccomp()
        except (OSError, ValueError, MemoryError) as error:
            write(_STATUS, f"{type(error).__name__}: {error}".encode())
            raise
        os.close(_STATUS)
        _converse(notebook)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(1)


def _limit(memory: int, cpu: int) -> None:
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: cpu, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 64,
              resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
              resource.RLIMIT_STACK: 8 << 20}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def _converse(notebook: Notebook) -> None:
    """Run the cells that come. A reply begins with its request's nonce, so that none can be sent in advance."""
    _send(b"ready")
    while request := _receive():
        output = notebook.run(request[_NONCE:].decode("utf-8", "surrogatepass"))
        _send(request[:_NONCE] + output.encode("utf-8", "replace"))


def _receive() -> bytes:
    """A frame: 4 bytes of length, then the payload. Empty at the end of the channel."""
    header = _exactly(4)
    return _exactly(struct.unpack(">I", header)[0]) if header else b""


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = read(_CHANNEL, size - len(data))
        if not part:
            return b""
        data += part
    return data


def _send(payload: bytes) -> None:
    data = memoryview(struct.pack(">I", len(payload)) + payload)
    while data:
        data = data[write(_CHANNEL, data):]


if __name__ == "__main__":
    main()
