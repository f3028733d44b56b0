"""The sandbox: its layers one by one, and what happens when its processes, or the one that uses it, die."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rtpo_ray.errors import SandboxError
from rtpo_ray.tools import sandbox
from rtpo_ray.tools.sandbox import Session, SessionEnded

ROOT = Path(__file__).parents[2]
LIMITS = {"memory": 256, "output": 1000}


@pytest.fixture
def confined():
    if missing := {name: why for name in sandbox.ESSENTIAL if (why := sandbox.layers()[name]) != "active"}:
        pytest.skip(f"this machine lacks {missing}")


def zygotes():
    """The warm processes and the sessions, outermost first; other tests may have left children of other kinds."""
    sandbox.layers()
    outer = psutil.Process(sandbox._current._process.pid)
    return [outer, *sorted(outer.children(recursive=True), key=lambda process: process.create_time())]


def gone(pids):
    def alive(pid):
        try:
            return psutil.Process(pid).status() != "zombie"  # whose parent, if it was killed, may never reap
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def script(text, refused=(), **variables):
    """Run a program of its own, in which these system calls are refused; what it printed."""
    head = f"""
import os, sys
from rtpo_ray.tools import confine
from rtpo_ray.tools.sandbox import Session, SessionEnded, layers
from rtpo_ray.errors import SandboxError
refused, steps = {refused!r}, []
for number, argument in refused:
    steps += [confine._step(0x20, 0), confine._step(0x15, number, 0, 3), confine._step(0x20, 16), confine._step(0x15, argument, 0, 1) if argument
              else confine._step(0x15, 0, 0, 0), confine._step(0x06, 0x00050001)]
if refused:
    confine._install([*steps, confine._step(0x06, 0x7fff0000)])
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", head + text], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


LANDLOCK, UNSHARE, SECCOMP = (444, 0), (272, 0), (157, 22)
TRIES = """
def attempt(session, code):
    return session.run(code, 20).splitlines()[-1].split(":")[0]
try:
    Session(256, 1000)
    print("required")
except SandboxError as error:
    print(error)
session = Session(256, 1000, isolation="best-effort")
for code in ("print(open(%r).read(3))", "open(%r, 'w')", "import os; os.listdir('/')[:0]",
             "import socket; socket.create_connection(('127.0.0.1', 9), 2)",
             "import os; os.fork() or os._exit(0); 0", "import ctypes; ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, b'')"):
    print(attempt(session, code % os.environ["FILE"] if "%" in code else code))
"""


@pytest.mark.parametrize(("refused", "missing", "expected"), [
    ((), set(), ["FileNotFoundError", "PermissionError", "PermissionError", "PermissionError", "PermissionError", "-1"]),
    ((UNSHARE,), {"hidden files"}, ["PermissionError", "PermissionError", "PermissionError", "PermissionError", "PermissionError", "-1"]),
    ((LANDLOCK,), {"landlock"}, ["FileNotFoundError", "PermissionError", "[]", "PermissionError", "PermissionError", "-1"]),
    ((LANDLOCK, UNSHARE), {"landlock", "hidden files"}, ["key", "PermissionError", "[]", "PermissionError", "PermissionError", "-1"]),
    ((SECCOMP,), {"seccomp"}, ["FileNotFoundError", "FileNotFoundError", "PermissionError", "PermissionError|OSError", "BlockingIOError|0", "-1"]),
], ids=["all", "no namespaces", "no Landlock", "neither", "no seccomp"])
def test_each_layer_holds_alone_and_the_essential_ones_are_required(confined, tmp_path, refused, missing, expected):
    if sandbox.layers()["hidden files"] != "active":
        pytest.skip(f"this machine cannot hide files: {sandbox.layers()['hidden files']}")
    (tmp_path / "secret").write_text("key")
    found = script("print(*(name for name, state in layers().items() if state != 'active' and 'namespace' not in name), sep=',')" + TRIES,
                   refused, FILE=str(tmp_path / "secret"))
    assert set(filter(None, found[0].split(","))) == missing
    if required := [name for name in sandbox.ESSENTIAL if name in missing]:
        assert found[1].startswith(f"this machine cannot confine Python code; missing: {required[0]} (") and "not permitted" in found[1]
        assert "isolation='best-effort'" in found[1]
    else:
        assert found[1] == "required"
    assert all(is_ in should.split("|") for is_, should in zip(found[2:], expected, strict=True)), found
    assert (tmp_path / "secret").read_text() == "key"


def test_the_warm_process_has_one_thread_and_nothing_of_ours(confined, monkeypatch):
    monkeypatch.setenv("RTPO_TOKEN", "canary")
    if sandbox._current is not None:
        sandbox._current.stop()
    sandbox.layers()
    for process in zygotes():
        assert process.num_threads() == 1
        assert set(process.environ()) <= {"PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LC_CTYPE"}


def test_a_session_outlives_the_thread_that_started_the_zygote(confined):
    sandbox.layers()
    sandbox._current.stop()
    made = []
    thread = threading.Thread(target=lambda: made.append(Session(**LIMITS)))
    thread.start()
    thread.join(60)
    assert made[0].run("6 * 7", 20) == "42"


@pytest.mark.parametrize("which", [0, -1], ids=["the outer process", "the inner process"])
def test_a_dead_zygote_takes_its_sessions_along_and_is_replaced(confined, which):
    session = Session(**LIMITS)
    session.run("x = 1", 20)
    processes = [process.pid for process in zygotes()]
    layers = 2 if sandbox.layers()["pid namespace"] == "active" else 1
    os.kill(processes[:layers][which], signal.SIGKILL)
    assert gone(processes)
    with pytest.raises(SessionEnded, match="ended from outside"):
        session.run("x", 20)
    assert Session(**LIMITS).run("6 * 7", 20) == "42"


def test_a_zygote_that_dies_unseen_costs_no_session(confined):
    sandbox.layers()
    os.kill(zygotes()[-1].pid, signal.SIGKILL)  # at once: its parent may not have noticed yet
    assert Session(**LIMITS).run("6 * 7", 20) == "42"


def test_a_zygote_that_hangs_delays_no_call_and_is_replaced(confined, monkeypatch):
    session, looping = Session(**LIMITS), Session(**LIMITS)
    zygote = zygotes()[1 if sandbox.layers()["pid namespace"] == "active" else 0]
    everything = [process.pid for process in zygotes()]
    os.kill(zygote.pid, signal.SIGSTOP)
    assert session.run("6 * 7", 20) == "42"
    start = time.monotonic()
    with pytest.raises(SessionEnded, match="ran longer than 0.3 s"):
        looping.run("while True: pass", 0.3)
    assert time.monotonic() - start < 5
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.5)
    with pytest.raises(SandboxError, match="did not start in 0.5 s"):
        Session(**LIMITS)
    monkeypatch.undo()
    assert gone(everything)
    assert Session(**LIMITS).run("6 * 7", 20) == "42"


def test_an_interpreter_that_does_not_start_is_named(monkeypatch):
    if sandbox._current is not None:
        sandbox._current.stop()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="the sandbox's zygote did not start.*/bin/false -s -P"):
        sandbox.layers()


def test_cpu_time_is_limited_over_all_cells(confined):
    session = Session(**LIMITS, cpu=1)
    with pytest.raises(SessionEnded, match="too much memory or CPU time"):
        for _ in range(100):
            session.run("for _ in range(10**6): pass", 20)
    with pytest.raises(SessionEnded, match="ended from outside"):
        session.run("1", 20)  # and it stays so


def test_sessions_end_with_a_process_that_is_killed(confined):
    text = """
import threading, time, psutil
session = Session(256, 1000)
threading.Thread(target=session.run, args=("import signal\\nwhile True: pass", 100), daemon=True).start()
while sum(psutil.Process().children(recursive=True)[-1].cpu_times()[:2]) < 0.2:
    time.sleep(0.01)
print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
os.kill(os.getpid(), 9)
"""
    program = "import os\nfrom rtpo_ray.tools.sandbox import Session\n" + text
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) >= 2
    assert gone(pids)


def test_a_fork_of_the_process_neither_ends_its_sessions_nor_keeps_them(confined):
    found = script("""
import gc, psutil, time
first = Session(256, 1000)
first.run("x = 1", 20)
second, closed = Session(256, 1000), Session(256, 1000)
leaves = [process for process in psutil.Process().children(recursive=True) if not process.children()]
ours, theirs = os.pipe()
child = os.fork()
if child == 0:
    del first              # its copy; it keeps those of the others
    gc.collect()
    print(Session(256, 1000).run("7", 20), flush=True)  # from a zygote of its own
    os.write(theirs, b"x")
    time.sleep(60)
    os._exit(0)
os.read(ours, 1)
print(first.run("x", 20))
closed.close()
del second
deadline = time.monotonic() + 10
while sum(leaf.is_running() for leaf in leaves) > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print(len(leaves), sum(leaf.is_running() for leaf in leaves))
os.kill(child, 9)
os.waitpid(child, 0)
""")
    assert found == ["7", "1", "3 1"]


def test_without_namespaces_a_busy_session_ends_with_its_zygote_too(confined):
    found = script("""
import psutil, threading, time
def go():
    try:
        session.run("while True: pass", 60)
    except SessionEnded as error:
        print(error)
session = Session(256, 1000)
zygote, busy = sorted(psutil.Process().children(recursive=True), key=lambda process: process.create_time())
thread = threading.Thread(target=go)
thread.start()
zygote.kill()
thread.join(20)
deadline = time.monotonic() + 10
while busy.is_running() and busy.status() != "zombie" and time.monotonic() < deadline:
    time.sleep(0.01)
print(thread.is_alive(), busy.is_running() and busy.status() != "zombie")
""", (UNSHARE,))
    assert found == ["the session was ended from outside", "False False"]


@pytest.mark.parametrize("refused", [(), (UNSHARE,)], ids=["namespaces", "none"])
def test_a_session_has_no_power_and_can_get_none(confined, refused):
    found = script("""
import psutil
session = Session(256, 1000)
last = max(psutil.Process().children(recursive=True), key=lambda process: process.create_time())
lines = dict(line.split(":", 1) for line in open(f"/proc/{last.pid}/status").read().splitlines())
print(*(lines[name].strip() for name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp", "Threads")))
""", refused)
    assert found == ["0000000000000000 0000000000000000 0000000000000000 0000000000000000 1 2 1"]


def test_addresses_are_the_same_in_every_process(confined):
    if script("import ctypes; print(ctypes.CDLL(None).personality(0x0040000))") == ["-1"]:
        pytest.skip("this machine does not let a process fix its addresses")
    outputs = []
    for _ in range(2):
        outputs.append(Session(**LIMITS).run("id(object()), hash(None), id(int)", 20))
        sandbox._current.stop()
    assert outputs[0] == outputs[1]
