"""AppWorld's environment, against a stand-in for its server: the same endpoints, fields and folders over a world of keys and values."""

import json
import posixpath
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rtpo_ray.environments.appworld import AppWorld
from rtpo_ray.environments.base import Observation
from rtpo_ray.episodes.toolcalls import format_hermes
from rtpo_ray.errors import EnvironmentLost

FIELDS = {"initialize": {"task_id", "experiment_name", "timeout_seconds"}, "execute": {"task_id", "code"}, "task_completed": {"task_id"},
          "evaluate": {"task_id", "suppress_errors", "report"}, "save_state": {"task_id", "state_id"}, "load_state": {"task_id", "state_id"},
          "close": {"task_id"}}


class World:
    """What a server holds: one task at a time. `saved` is the folder that servers share."""

    def __init__(self, saved):
        self.saved, self.task, self.values, self.variable, self.done = saved, None, {}, None, False

    def folder(self):
        return f"outputs/{self.experiment}/tasks/{self.task}"

    def initialize(self, task_id, experiment_name, timeout_seconds):
        assert 1 <= timeout_seconds < 50
        self.task, self.experiment, self.values, self.variable, self.done = task_id, experiment_name, {}, None, False
        for path in [path for path in self.saved if path.startswith(self.folder())]:
            del self.saved[path]
        return {"task_id": task_id, "instruction": "Set a to 1 and b to 2.", "datetime": "2023-05-18T12:00:00", "supervisor": {
            "first_name": "Ada", "last_name": "Low", "email": "ada@mail.com", "phone_number": "123"}}

    def execute(self, code):
        words = code.split()
        if words[0] == "set":
            self.values[words[1]] = words[2]
        elif words[0] == "keep":
            self.variable = words[1]
        elif words[0] == "show":
            return f"{sorted(self.values.items())} {self.variable}\n"
        elif words[0] == "complete":
            self.done = True
        else:
            return f"Execution failed. Traceback:\nNameError: name {words[0]!r} is not defined"
        return "Execution successful."

    def task_completed(self):
        return self.done

    def evaluate(self, suppress_errors, report):
        assert (suppress_errors, report) == (True, False)
        tests = {"a is 1": self.values.get("a") == "1", "b is 2": self.values.get("b") == "2"}
        passes, failures = ([{"requirement": name} for name, passed in tests.items() if passed is wanted] for wanted in (True, False))
        return {"success": not failures, "difficulty": 1, "num_tests": 2, "passes": passes, "failures": failures}

    def save_state(self, state_id):
        self.saved[posixpath.join(self.folder(), "checkpoints", state_id)] = (dict(self.values), self.done)
        return state_id

    def load_state(self, state_id):
        values, self.done = self.saved[posixpath.normpath(posixpath.join(self.folder(), "checkpoints", state_id))]
        self.values = dict(values)

    def close(self):
        self.task = None


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        name, world = self.path.strip("/"), self.server.world
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(name)
        if name == self.server.refuses:
            status, reply = 500, b"no such task"
        elif set(given) != FIELDS[name] or (name != "initialize" and given["task_id"] != world.task):
            status, reply = 422, json.dumps(given).encode()
        else:
            fields = given if name == "initialize" else {key: value for key, value in given.items() if key != "task_id"}
            status, reply = 200, json.dumps({"output": getattr(world, name)(**fields)}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def servers():
    """Two stand-ins that share a folder."""
    saved, started = {}, []
    for _ in range(2):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.world, server.asked, server.refuses = World(saved), [], ""
        server.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        started.append(server)
    yield started
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def make(servers):
    """Makes environments of these servers, and closes them."""
    made = []

    def make(*which, **options):
        environment = AppWorld(servers=[server.address for server in which or servers], **options)
        environment.row = {"task_id": "82e2fac_1"}
        made.append(environment)
        return environment

    yield make
    for environment in made:
        environment.close()


def run(*codes):
    return "".join(format_hermes("execute", {"code": code}) for code in codes)


def test_code_is_run_on_the_server_until_the_task_is_completed(make, servers):
    world = make(servers[0])
    first = world.reset(0)
    assert first == Observation("Set a to 1 and b to 2.\n\nI am Ada Low, ada@mail.com, 123. It is 2023-05-18T12:00:00.")
    assert [schema["function"]["name"] for schema in world.tools()] == ["execute"]
    step = world.step(run("set a 1", "print"))
    assert step.observation == Observation("Execution successful.\nExecution failed. Traceback:\nNameError: name 'print' is not defined", role="tool")
    assert world.step("I am done.").observation.text.startswith("No code was run")
    world.step(run("set b 2"))
    last = world.step(run("complete"))
    assert (last.reward, last.terminated, last.truncated, last.observation) == (1.0, True, False, None)
    world.close()
    world.close()
    assert servers[0].asked == ["initialize", "execute", "execute", "task_completed", "execute", "task_completed", "execute", "task_completed",
                                "evaluate", "close"]


@pytest.mark.parametrize(("codes", "partial", "reward"), [
    (["set a 1", "set b 2"], False, 1.0), (["set a 1"], False, 0.0), (["set a 1"], True, 0.5), ([], True, 0.0)])
def test_the_reward_is_the_servers_evaluation(make, servers, codes, partial, reward):
    world = make(servers[0], partial=partial)
    world.reset(0)
    assert world.step(run(*codes, "complete")).reward == reward


def test_the_last_response_is_evaluated_too(make, servers):
    world = make(servers[0], max_responses=2, partial=True)
    world.reset(0)
    assert world.step("Hm.").observation is not None
    step = world.step(run("set a 1"))
    assert (step.reward, step.truncated, step.terminated, step.observation) == (0.5, True, False, None)


def test_a_saved_state_is_loaded_on_another_server_as_often_as_one_likes(make, servers):
    trunk, sibling = make(servers[0], replay=False), make(servers[1], replay=False)
    trunk.reset(0)
    trunk.step(run("set a 1", "keep note"))
    state, snapshot = trunk.state_hash(), trunk.snapshot()
    trunk.step(run("set a 3"))
    for _ in range(2):
        sibling.restore(snapshot)
        assert sibling.state_hash() == state
        assert sibling.step(run("show")).observation.text == "[('a', '1')] None\n"  # variables are gone, as the documentation says
        assert sibling.state_hash() != state
        assert sibling.step(run("set b 2", "complete")).reward == 1.0
    assert trunk.step(run("show")).observation.text == "[('a', '3')] note\n"


def test_a_replayed_sibling_has_variables_too(make, servers):
    trunk, sibling = make(servers[0]), make(servers[1])
    assert trunk.replay
    texts = [run("set a 1"), run("keep note")]
    hashes = []
    for world in (trunk, sibling):
        world.reset(0)
        for text in texts:
            world.step(text)
        hashes.append(world.state_hash())
    assert hashes[0] == hashes[1]
    assert sibling.step(run("show")).observation.text == "[('a', '1')] note\n"


def test_episodes_have_a_server_each_and_wait_for_one(make, servers):
    first, second = make(), make()
    first.reset(0)
    second.reset(0)
    assert {server.asked[0] for server in servers} == {"initialize"}
    third = make(patience=0.3)
    with pytest.raises(TimeoutError, match=r"no AppWorld server of http://.*, http://.* got free in patience=0.3 s; start as many as episodes"):
        third.reset(0)
    first.step(run("set a 1"))
    second.step(run("set a 2"))
    assert [world.step(run("show")).observation.text for world in (first, second)] == ["[('a', '1')] None\n", "[('a', '2')] None\n"]
    first.close()
    third.reset(0)
    assert third.step(run("show")).observation.text == "[] None\n"


def test_a_dead_server_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        mute = AppWorld(servers=[address], timeout=0.2)  # takes connections and never answers
        mute.row = {"task_id": "82e2fac_1"}
        with pytest.raises(EnvironmentLost, match=f"AppWorld server {address} does not answer /initialize .timeout=0.2 s.: timed out; start it with"):
            mute.reset(0)
        mute.close()
    with pytest.raises(EnvironmentLost, match=f"AppWorld server {address} does not answer /initialize .*Connection refused; start it with"):
        mute.reset(0)
    mute.close()


def test_a_refusal_says_what_the_server_said(make, servers):
    servers[0].refuses = "execute"
    world = make(servers[0])
    world.reset(0)
    with pytest.raises(EnvironmentLost, match=r"refused /execute of task '82e2fac_1' with status 500: no such task"):
        world.step(run("set a 1"))


@pytest.mark.parametrize(("options", "message"), [
    ({"servers": []}, r"servers is \[\]; expected a list of addresses"), ({"servers": "http://x"}, "servers is 'http://x'; expected a list"),
    ({"timeout": 0}, "timeout is 0; expected more than 0"), ({"max_responses": 0}, "max_responses is 0; expected more than 0")])
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AppWorld(**options)
