"""The Python tool: hostile code is contained, state stays and travels, nothing leaks."""

import copy
import gc
import os
import pickle
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import hostile
import psutil
import pytest

from rtpo_ray.environments.base import Step, ToolEnvironment
from rtpo_ray.episodes.toolcalls import format_hermes
from rtpo_ray.tools import sandbox
from rtpo_ray.tools.base import ToolError
from rtpo_ray.tools.python import Python

os.environ["RTPO_SECRET"] = hostile.SECRET  # before the zygote starts


@pytest.fixture(autouse=True)
def confined():
    if missing := {name: why for name in sandbox.ESSENTIAL if (why := sandbox.layers()[name]) != "active"}:
        pytest.skip(f"this machine lacks {missing}")


@pytest.fixture
def make():
    made = []

    def _make(**options):
        made.append(Python(**options))
        return made[-1]

    yield _make
    for tool in made:
        tool.close()


@pytest.fixture(scope="module")
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        yield server


def call(tool, code):
    """(output, "") or ("", why the session ended)."""
    try:
        return tool.python(code), ""
    except ToolError as error:
        return "", str(error)


def files(folder):
    return {path: (path.stat().st_mode, path.stat().st_uid, path.read_bytes()) for path in folder.rglob("*")}


@pytest.mark.parametrize("snippet", hostile.SNIPPETS, ids=lambda snippet: snippet.name)
def test_hostile_code_is_contained(snippet, make, tmp_path, listener):
    secret = tmp_path / "secret"
    secret.write_text(hostile.SECRET)
    code = snippet.code
    for name, value in {"secret": secret, "folder": tmp_path, "port": listener.getsockname()[1]}.items():
        code = code.replace("{" + name + "}", str(value))
    tool, other = make(seconds=snippet.seconds, memory=256, output=1000), make()
    assert (tool.python("kept = 41"), other.python("mine = 1")) == ("(no output)", "(no output)")
    before, temporary, shared = files(tmp_path), set(os.listdir("/tmp")), set(os.listdir("/dev/shm"))
    start = time.monotonic()
    output, reason = call(tool, code)
    seconds = time.monotonic() - start
    assert seconds < snippet.seconds + 5  # half a second over it on an idle machine
    assert snippet.ended in (bool(reason), None), output or reason
    assert re.search(snippet.pattern, reason or output, re.DOTALL), reason or output
    assert hostile.SECRET not in reason + output and len(output) < 1100
    assert files(tmp_path) == before
    assert "new" not in (set(os.listdir("/tmp")) - temporary) | (set(os.listdir("/dev/shm")) - shared)
    with pytest.raises(TimeoutError):
        listener.accept()
    assert (tool.python("kept + 1"), other.python("mine")) == ("42", "1")


def test_a_stolen_nonce_forges_the_thief_s_own_reply_and_no_other(make):
    tool, other = make(), make()
    other.python("mine = 1")
    output, _ = call(tool, "import os, struct, sys\nframe = sys._getframe()\nwhile 'request' not in frame.f_locals: frame = frame.f_back\n"
                           "reply = frame.f_locals['request'][:16] + b'forged'\nos.write(3, (struct.pack('>I', len(reply)) + reply) * 2)")
    assert output == "forged"  # it might as well have printed that
    assert "own connection" in call(tool, "'honest'")[1]
    assert other.python("mine") == "1"
    tool.close()
    assert [code for code, _ in tool.cells][1:] == []


def test_state_stays_from_call_to_call(make):
    tool = make()
    assert tool.python("import math\ndef area(r):\n    return math.pi * r**2") == "(no output)"
    assert tool.python("print('a'); print('b', file=__import__('sys').stderr); area(1)") == "a\nb\n3.141592653589793"
    assert tool.python("x = 3\nx / 0\ny = 1").endswith("ZeroDivisionError: division by zero")
    assert tool.python("x, 'y' in globals()") == "(3, False)"
    assert tool.python("from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\nP(2)") == "P(a=2)"
    assert tool.python("import pickle; pickle.loads(pickle.dumps(P(5)))") == "P(a=5)"


def test_a_traceback_is_short_and_shows_the_cells_lines_only(make):
    tool = make()
    tool.python("def f(n):\n    return 1 / n if n == 0 else f(n - 1)")
    assert tool.python("f(0)") == ('Traceback (most recent call last):\n  File "<cell 2>", line 1, in <module>\n    f(0)\n'
                                   '  File "<cell 1>", line 2, in f\n    return 1 / n if n == 0 else f(n - 1)\n           ~~^~~\n'
                                   "ZeroDivisionError: division by zero")
    assert tool.python("f(90)").count("\n") < 15
    assert tool.python("x = (") == '  File "<cell 4>", line 1\n    x = (\n        ^\nSyntaxError: \'(\' was never closed'


def test_numpy_and_sympy_are_there(make):
    pytest.importorskip("numpy")
    pytest.importorskip("sympy")
    tool = make()
    assert tool.python("import sympy\nx = sympy.symbols('x')\nsympy.solve(x**2 - 5*x + 6)") == "[2, 3]"
    assert tool.python("import numpy as np\nfloat((np.ones((50, 50)) @ np.ones((50, 50))).sum())") == "125000.0"


def test_a_copy_goes_on_from_the_same_state(make):
    tool = make()
    for code in ("import random\nx = [random.random() for _ in range(3)]\nx", "x.append(1)\n1/0",
                 "s = {'b', 'a', 'c', None, print}\nprint(s)", "object()"):
        tool.python(code)
    states = [pickle.dumps(tool), copy.deepcopy(tool)]
    copies = [pickle.loads(states[0]), states[1]]
    assert all(one._session is None for one in copies)  # until it is needed
    sandbox._current.stop()  # another process, with other addresses
    nexts = ["x", "random.random(), list(s)", "import sympy, numpy; numpy.random.rand(), sympy.core.random.rng.random()"]
    expected = [make().python("import random\nx = [random.random() for _ in range(3)] + [1]\nx")]
    outputs = [[one.python(code) for code in nexts] for one in copies]
    assert outputs[0] == outputs[1] and outputs[0][0] == expected[0]
    assert copies[0].cells == copies[1].cells and len(copies[0].cells) == 7
    assert pickle.dumps(copies[0]) == pickle.dumps(copies[1])


@pytest.mark.parametrize("code", ["import time; time.time_ns()", "import os; os.urandom(8)", "import random; random.SystemRandom().random()"])
def test_a_cell_that_is_not_deterministic_is_named(make, code):
    tool = make()
    tool.python("1")
    tool.python(code)
    with pytest.raises(RuntimeError, match=r"cell 2 of 2 is not deterministic: it gave .* and .* when it was run again; .*time"):
        copy.deepcopy(tool).python("2")


def test_a_cell_that_cannot_be_run_again_is_named(make):
    tool = make(seconds=1)
    tool.cells = [("x = 1", ""), ("while True: pass", "")]
    with pytest.raises(RuntimeError, match="cell 2 of 2 ran before and does not run again: the code ran longer than 1 s"):
        tool.python("x")


def test_a_killed_session_leaves_the_cells_before_it(make):
    tool = make()
    tool.python("x = 1")
    tool.python("x = 2\n1/0")
    output, reason = call(tool, "x = 3\nimport os; os._exit(0)")
    assert (output, reason) == ("", "the code ended the interpreter with exit code 0; this code has no effect, the names from before it are kept")
    assert tool.python("x") == "2"
    assert [code for code, _ in tool.cells] == ["x = 1", "x = 2\n1/0", "x"]


def test_a_closed_tool_goes_on(make):
    tool = make()
    tool.python("x = 1")
    tool.close()
    tool.close()
    assert tool.python("x") == "1"


def test_outputs_are_cut_in_the_middle(make):
    tool = make(output=10)
    assert tool.python("'a' * 8") == "'aaaaaaaa'"
    assert tool.python("print('abcdefghijklm', end='')") == "abcde\n... 3 characters cut ...\nijklm"
    assert tool.python("for c in 'abcdefghijklm' * 1000: print(c, end='')") == "abcde\n... 12990 characters cut ...\nijklm"


@pytest.mark.parametrize(("option", "text"), [({"seconds": 0}, "seconds is 0; expected more than 0 and less than a day"),
                                              ({"memory": 31}, "memory is 31; expected at least 32 (MiB)"),
                                              ({"output": 1}, "output is 1; expected at least 2"),
                                              ({"isolation": "none"}, "isolation is 'none'; expected 'require' or 'best-effort'")])
def test_wrong_options_are_refused(option, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Python(**option)


class Desk(ToolEnvironment):
    def __init__(self):
        super().__init__(toolsets=(Python(seconds=5),))

    def answer(self, text):
        return Step(reward=float(text == "42"), terminated=True)


def test_an_environment_with_the_tool_branches():
    desk, sibling = Desk(), Desk()
    (schema,) = desk.tools()
    assert (schema["function"]["name"], schema["function"]["parameters"]["required"]) == ("python", ["code"])
    first = desk.step(format_hermes("python", {"code": "x = 41"}))
    snapshot, before = desk.snapshot(), desk.state_hash()
    sibling.restore(snapshot)
    assert sibling.state_hash() == before
    steps = [world.step(format_hermes("python", {"code": "x += 1; x"})) for world in (desk, sibling)]
    assert [step.observation.text for step in (first, *steps)] == ["(no output)", "42", "42"]
    assert desk.state_hash() == sibling.state_hash() != before
    failed = desk.step(format_hermes("python", {"code": "import os; os._exit(1)"}))
    assert failed.info["failed_calls"] == 1 and failed.observation.text.startswith("error: python: the code ended the interpreter with exit code 1")
    assert sibling.step(format_hermes("python", {"code": "x"})).observation.text == "42"
    desk.close()
    sibling.close()


def test_eight_sessions_at_once(make):
    tools = [make() for _ in range(8)]

    def play(number):
        tool = tools[number]
        tool.python(f"x = {number}")
        for _ in range(10):
            tool.python("x += 10")
        if number % 2:
            call(tool, "import os; os._exit(1)")
        return tool.python("x")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(8))) == [str(number + 100) for number in range(8)]


def warm():
    """The sandbox's processes and its sessions; other tests may have left children of other kinds."""
    outer = psutil.Process(sandbox._current._process.pid)
    return [outer, *outer.children(recursive=True)]


def processes():
    return {process.pid for process in warm()}


def descriptors():
    zygote = max(warm(), key=lambda process: process.create_time())
    return len(os.listdir("/proc/self/fd")), zygote.num_fds()


def settled(measure, expected):
    """Wait until it is so, at most 10 s: processes end a little after their sockets."""
    deadline = time.monotonic() + 10
    while (found := measure()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_a_thousand_calls_leak_nothing():
    gc.collect()
    Python().python("1")
    zygote = settled(lambda: len(processes()), 2 if sandbox.layers()["pid namespace"] == "active" else 1)
    running, opened = processes(), descriptors()
    assert len(running) == zygote
    for round_ in range(52):
        tool = Python()
        for number in range(19):
            tool.python(f"x = {number}")
        match round_ % 4:
            case 0:
                tool.python("x")
                tool.close()
            case 1:
                call(tool, "import os; os._exit(0)")
            case 2:
                call(tool, "import ctypes; ctypes.string_at(0)")
            case 3:
                tool.python("import signal; signal.signal(15, signal.SIG_IGN)")  # then it is dropped
        del tool
    assert settled(processes, running) == running
    assert settled(descriptors, opened) == opened
