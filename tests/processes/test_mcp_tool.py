"""MCP servers as tools, against the server in mcp_server.py: results, failures, deadlines, state, and processes that end."""

import gc
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rtpo_ray.environments.base import ToolEnvironment
from rtpo_ray.episodes.toolcalls import format_hermes
from rtpo_ray.errors import ToolServerError
from rtpo_ray.tools.base import ToolError, Toolset
from rtpo_ray.tools.mcp import Mcp

ROOT = Path(__file__).parents[2]
SERVER = str(Path(__file__).with_name("mcp_server.py"))


@pytest.fixture
def made():
    """Makes toolsets, and closes them."""
    toolsets = []

    def make(**options):
        toolsets.append(Mcp(**({"command": sys.executable, "args": [SERVER]} if "url" not in options else {}) | options))
        return toolsets[-1]

    yield make
    for toolset in toolsets:
        toolset.close()


def pid(toolset):
    return int(toolset.run("process", {}))


def gone(process, seconds=8.0):
    """Whether the process ends before the deadline."""
    try:
        psutil.Process(process).wait(seconds)
    except psutil.NoSuchProcess:
        pass
    return not psutil.pid_exists(process)


def test_tools_are_listed_as_function_schemas(made):
    toolset = made(stateless=True)
    assert toolset.names() == ["count", "echo", "fail", "hang", "crash", "process", "variable", "picture"]
    schema = {schema["function"]["name"]: schema for schema in toolset.schemas()}["echo"]
    assert (schema["type"], schema["function"]["description"]) == ("function", "Say it again.")
    parameters = schema["function"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["text"])
    assert {name: spec["type"] for name, spec in parameters["properties"].items()} == {"text": "string", "times": "integer"}
    assert made(stateless=True, tools=["echo", "count"]).names() == ["count", "echo"]
    with pytest.raises(ValueError, match=r"tools is \['echo', 'shout'\]: MCP server .*mcp_server.py has no shout; it has count, echo, fail"):
        made(stateless=True, tools=["echo", "shout"]).schemas()


@pytest.mark.parametrize(("name", "arguments", "text"), [
    ("echo", {"text": "ab", "times": 2}, "abab"),
    ("picture", {}, "look\n[image of type image/png]"),
    ("fail", {"text": "no way"}, "error: fail: Error executing tool fail: no way"),
    ("echo", {}, "error: echo: 'text' is a required property"),
    ("echo", {"text": 7}, "error: echo: argument 'text': 7 is not of type 'string'"),
    ("echo", {"text": "a", "times": "2"}, "error: echo: argument 'times': '2' is not of type 'integer'"),
])
def test_a_model_reads_results_and_what_was_wrong_with_its_call(made, name, arguments, text):
    environment = ToolEnvironment(toolsets=[made(stateless=True)])
    assert environment.step(format_hermes(name, arguments)).observation.text == text


def test_a_server_gets_its_variables_and_no_snapshot_holds_them(made, monkeypatch):
    monkeypatch.setenv("OURS", "private")
    toolset = made(replay="allow", env={"TOKEN": "hunter2"})
    assert [toolset.run("variable", {"name": name}) for name in ("TOKEN", "OURS")] == ["hunter2", "not set"]
    toolset.calls.clear()
    snapshot = pickle.dumps(toolset)
    assert b"hunter2" not in snapshot
    assert pickle.loads(snapshot).address == toolset.address
    script = "import pickle, sys\npickle.loads(bytes.fromhex(sys.argv[1])).schemas()"
    done = subprocess.run([sys.executable, "-c", script, snapshot.hex()], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=60)
    assert "its address is in no snapshot, and this process has made no toolset with it" in done.stderr


def test_long_results_are_cut(made):
    assert made(stateless=True, output_chars=5).run("echo", {"text": "abcd", "times": 3}) == "abcda ... (12 characters)"


def test_stateless_servers_are_shared_and_stateful_ones_are_not(made):
    shared = made(stateless=True)
    first, second = made(), made()
    assert pid(shared) == pid(made(stateless=True)) == pid(pickle.loads(pickle.dumps(shared)))
    assert len({pid(shared), pid(first), pid(second)}) == 3
    assert [first.run("count", {"by": 2}), first.run("count", {}), second.run("count", {})] == ["2", "3", "1"]
    shared.close()
    assert pid(made(stateless=True)) > 0  # closing an episode's toolset leaves the others their server
    with pytest.raises(ToolServerError, match="a call after the episode was closed"):
        shared.run("echo", {"text": "a"})


def test_many_threads_share_a_server(made):
    toolset = made(stateless=True)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: toolset.run("echo", {"text": str(number)}), range(40))) == [str(number) for number in range(40)]


def test_a_server_that_dies_costs_the_rollout_and_says_its_last_words(made):
    toolset = made()
    with pytest.raises(ToolServerError, match=r"MCP server .*mcp_server.py: crash failed: .*; its last words: (?s:.*)that was too much$"):
        toolset.run("crash", {})
    with pytest.raises(ToolServerError, match="cannot be used any more: crash failed"):  # its state is lost: never a fresh one in silence
        toolset.run("count", {})
    shared = made(stateless=True)
    before = pid(shared)
    with pytest.raises(ToolServerError, match="crash failed"):
        shared.run("crash", {})
    assert pid(shared) != before


def test_a_call_has_a_deadline_and_its_server_is_replaced(made):
    toolset = made(stateless=True, seconds=0.5)
    before = pid(toolset)
    start = time.monotonic()
    with pytest.raises(ToolServerError, match="hang gave no result within 0.5 s"):
        toolset.run("hang", {})
    assert time.monotonic() - start < 3
    assert pid(toolset) != before
    assert gone(before)  # though it answers to nothing


@pytest.mark.parametrize(("script", "error"), [
    ("import sys; sys.exit('bad day')", "did not start: .*; its last words: bad day"),
    ("import time; time.sleep(600)", "did not start within 0.5 s"),
])
def test_a_server_that_does_not_start_is_an_error_that_names_it(script, error):
    toolset = Mcp(command=sys.executable, args=["-c", script], start_seconds=0.5 if "time" in script else 60)
    children = set(psutil.Process().children())
    with pytest.raises(ToolServerError, match=f"MCP server .*python.* -c {re.escape(script)}: {error}"):
        toolset.schemas()
    assert all(gone(child.pid) for child in set(psutil.Process().children()) - children)


def test_a_command_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(ToolServerError, match="MCP server nonesuch --loud: did not start: FileNotFoundError"):
        Mcp(command="nonesuch", args=["--loud"]).schemas()


def test_a_state_that_cannot_be_copied_is_refused_but_hashed(made):
    assert Toolset().branching_error() == ""
    toolset = made()
    environment = ToolEnvironment(toolsets=[toolset])
    before = environment.state_hash()
    environment.step(format_hermes("count", {"by": 1}))
    assert environment.state_hash() != before  # methods that never branch go on
    why = "this server's state cannot be copied, so a method that branches .* cannot restore it; set replay=allow .* or stateless=true"
    assert re.search(f"^MCP server .*mcp_server.py: {why}", toolset.branching_error())
    assert toolset.replay is False
    with pytest.raises(TypeError, match=why):
        environment.snapshot()
    assert made(stateless=True).branching_error() == made(replay="allow").branching_error() == ""


def test_a_copy_replays_the_calls_so_far_on_a_server_of_its_own(made):
    toolset = made(replay="allow")
    environment = ToolEnvironment(toolsets=[toolset])
    for call in (format_hermes("count", {"by": 2}), format_hermes("fail", {"text": "once"}), format_hermes("count", {"by": 3})):
        environment.step(call)
    snapshot, after = environment.snapshot(), environment.state_hash()
    assert toolset.run("count", {"by": 10}) == "15"
    sibling = ToolEnvironment()
    sibling.restore(snapshot)
    copy = sibling.toolsets[0]
    assert sibling.state_hash() == after
    assert copy._server is None  # nothing is started before it is needed
    assert sibling.step(format_hermes("count", {})).observation.text == "6"
    assert [call[0] for call in copy.calls] == ["count", "fail", "count", "count"]
    assert toolset.run("count", {}) == "16"
    sibling.close()


def test_a_replay_with_other_results_is_an_error_that_names_the_call(made):
    toolset = made(replay="allow")
    before = pid(toolset)
    copy = pickle.loads(pickle.dumps(toolset))
    for _ in range(2):
        with pytest.raises(ToolServerError, match=rf"replaying process\({{}}\) gave '\d+', but it gave '{before}' before|cannot be used any more"):
            copy.run("count", {})
    copy.close()


def test_processes_end_when_toolsets_are_closed_or_forgotten():
    def use(way):
        toolset = Mcp(command=sys.executable, args=[SERVER])
        process = pid(toolset)
        if way == "close":
            toolset.close()
            toolset.close()
            assert not psutil.pid_exists(process)
        return process

    with ThreadPoolExecutor(2) as pool:
        processes = list(pool.map(use, ["close", "forget"]))
    gc.collect()
    assert len(set(processes)) == 2
    assert all(map(gone, processes))


def test_processes_end_with_the_one_that_started_them():
    script = ("import sys\nfrom rtpo_ray.tools.mcp import Mcp\n"
              "shared, own = (Mcp(sys.executable, [sys.argv[1]], stateless=flag) for flag in (True, False))\n"
              "print(shared.run('process', {}), own.run('process', {}))")
    done = subprocess.run([sys.executable, "-c", script, SERVER], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(gone(int(process)) for process in done.stdout.split())


def test_a_server_is_reached_over_streamable_http(made):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert any("running on" in line for line in running.stderr)  # ends with the process, should that fail
        toolset = made(url=f"http://127.0.0.1:{port}/mcp", seconds=20, replay="allow")
        assert toolset.names()[:2] == ["count", "echo"]
        assert toolset.run("echo", {"text": "over http"}) == "over http"
        assert toolset.misfit("echo", {"text": 1}) == "argument 'text': 1 is not of type 'string'"
        with pytest.raises(ToolError, match="no way"):
            toolset.run("fail", {"text": "no way"})
        running.kill()
        running.wait(10)
        with pytest.raises(ToolServerError, match=f"MCP server http://127.0.0.1:{port}/mcp: echo "):
            toolset.run("echo", {"text": "anyone?"})
    finally:
        running.kill()
        running.wait(10)
        running.stderr.close()


@pytest.mark.parametrize(("options", "error"), [
    ({}, "command is '' and url is ''; expected exactly one of them"), ({"command": "a", "url": "b"}, "expected exactly one of them"),
    ({"url": "http://a", "args": ["b"]}, "args and env are for a command"), ({"command": "a", "args": "b c"}, "args is 'b c' .*expected lists"),
    ({"command": "a", "seconds": 0}, "seconds is 0; expected more than 0"), ({"command": "a", "start_seconds": -1}, "start_seconds is -1"),
    ({"command": "a", "output_chars": 0}, "output_chars is 0"), ({"command": "a", "replay": True}, "replay is True; expected refuse or allow"),
])
def test_impossible_options_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        Mcp(**options)
