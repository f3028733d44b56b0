"""AppWorld: everyday tasks over the simulated apps of a person, done by writing Python, on AppWorld's own environment servers.

AppWorld has its own interpreter and its own data, so it runs beside: `appworld serve environment --port 8000`, one server for every
episode that is played at a time, on the machine that plays it. What is written here follows the server of appworld 0.1.3; it is tested
against a stand-in with the same endpoints, since the real one's data is not to be had everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import pickle
import random
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rtpo_ray.environments.base import Observation, Step, ToolEnvironment, tool
from rtpo_ray.environments.foreign import state_hash
from rtpo_ray.errors import EnvironmentLost

_SYSTEM = """You do a person's tasks in their apps by writing Python, which the function execute runs. Variables stay from one call to the next.
The object `apis` holds the apps: apis.api_docs.show_app_descriptions() lists them, apis.api_docs.show_api_descriptions(app_name=...) their
functions, apis.api_docs.show_api_doc(app_name=..., api_name=...) how one is called. Print what you want to see.
When the task is done call apis.supervisor.complete_task(), with answer=... where the task asks a question."""
_IDLE = "No code was run: call execute. The task ends with apis.supervisor.complete_task()."


class AppWorld(ToolEnvironment):
    """A row's `task_id` names the task. The episode ends when the code calls `apis.supervisor.complete_task`, or after `max_responses`; the reward
    is then the server's evaluation: 1 when all tests of the task pass, else 0.

    A server holds one world at a time, so an episode has one for itself until it is closed; episodes of all processes of the machine
    respect each other.

    Args:
        servers: addresses of the environment servers, for this machine alone.
        partial: reward the share of tests that pass instead.
        max_responses: that an episode may take.
        timeout: seconds that one request may take; the server ends a piece of code after four fifths of them, and the model reads so.
        patience: seconds to wait for a free server. Both belong below environment.step_timeout.
        replay: branch by running the recorded responses again. False saves the state on the server and loads it: that is the apps' state alone,
            so variables that earlier code made are gone; and the servers must share one root folder, of which nothing is ever removed.
    """

    fields = ("task_id",)
    system = _SYSTEM

    def __init__(self, servers: Sequence[str] = ("http://127.0.0.1:8000",), partial: bool = False, max_responses: int = 40, timeout: float = 50.0,
                 patience: float = 50.0, replay: bool = True) -> None:
        super().__init__()
        if isinstance(servers, str) or not servers:
            raise ValueError(f"servers is {servers!r}; expected a list of addresses such as http://127.0.0.1:8000")
        for name, value in (("max_responses", max_responses), ("timeout", timeout), ("patience", patience)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; expected more than 0")
        self.servers, self.partial, self.max_responses, self.timeout, self.patience = tuple(servers), partial, max_responses, timeout, patience
        self.replay = replay
        self.task_id = ""
        self.taken = 0  # responses
        self.log: list[tuple[str, str]] = []  # code and what it printed
        self._server = ""  # the one that this episode has
        self._lock: FileLock | None = None  # of it
        self._experiment = ""  # the server's folder for this episode

    def reset(self, seed: int) -> Observation:
        """The task and the person. Nothing is left to the seed. Raises TimeoutError when no server gets free, EnvironmentLost when one is dead."""
        task = self._begin(self.row["task_id"])
        self.taken, self.log = 0, []
        person = task["supervisor"]
        return Observation(f"{task['instruction']}\n\nI am {person['first_name']} {person['last_name']}, {person['email']}, "
                           f"{person['phone_number']}. It is {task['datetime']}.")

    @tool
    def execute(self, code: str) -> str:
        """Run Python code. What it prints is the result.

        Args:
            code: to run
        """
        output = str(self._ask("execute", code=code))
        self.log.append((code, output))
        return output

    def answer(self, text: str) -> Step:
        return Step(observation=Observation(_IDLE))

    def step(self, response_text: str) -> Step:
        ran = len(self.log)
        step = super().step(response_text)
        self.taken += 1
        if len(self.log) > ran and self._ask("task_completed"):
            return Step(reward=self._grade(), terminated=True, info=step.info)
        if self.taken == self.max_responses:
            return Step(reward=self._grade(), truncated=True, info=step.info)
        return step

    def snapshot(self) -> Any:
        """The id of a state that the server saves, and the log."""
        name = str(len(self.log))
        self._ask("save_state", state_id=name)
        # The server clears the folder of an experiment when a world begins, so every episode has one of its own and reaches into the trunk's.
        path = f"../../../../{self._experiment}/tasks/{self.task_id}/checkpoints/{name}"
        return pickle.dumps((self.task_id, self.taken, self.log, path))

    def restore(self, snapshot: Any) -> None:
        task_id, self.taken, self.log, path = pickle.loads(snapshot)
        self._begin(task_id)
        self._ask("load_state", state_id=path)

    def state_hash(self) -> str:
        """Of what was run and printed; the server's own state is not to be seen."""
        return state_hash((self.task_id, self.taken, self.log))

    def close(self) -> None:
        if self._lock is None:
            return
        with contextlib.suppress(EnvironmentLost):  # it is left anyway, and the next episode's first request says what is wrong
            self._ask("close")
        self._lock.release()
        self._lock, self._server = None, ""

    def _begin(self, task_id: str) -> dict[str, Any]:
        """Start a world; the server's description of the task."""
        self._lease()
        self.task_id, self._experiment = task_id, f"rtpo-{uuid.uuid4().hex}"
        task: dict[str, Any] = self._ask("initialize", experiment_name=self._experiment, timeout_seconds=max(1, int(0.8 * self.timeout)))
        return task

    def _lease(self) -> None:
        """Have a server for this episode. A file lock keeps other processes out; it falls when its holder dies."""
        deadline = time.monotonic() + self.patience
        while self._lock is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no AppWorld server of {', '.join(self.servers)} got free in patience={self.patience:g} s; "
                                   "start as many as episodes are played at a time, and name them in environment.args.servers")
            for server in random.Random().sample(self.servers, len(self.servers)):  # whichever; a dead one is not always the first to be tried
                key = hashlib.blake2b(server.encode(), digest_size=8).hexdigest()
                lock = FileLock(Path(tempfile.gettempdir()) / f"rtpo-appworld-{key}.lock", thread_local=False)  # steps run in several threads
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=0.1)
                    self._lock, self._server = lock, server
                    return

    def _grade(self) -> float:
        result = self._ask("evaluate", suppress_errors=True, report=False)
        return len(result["passes"]) / result["num_tests"] if self.partial else float(result["success"])

    def _ask(self, what: str, **fields: Any) -> Any:
        """The output of a request. Raises EnvironmentLost with the server's name."""
        body = json.dumps({"task_id": self.task_id, **fields}).encode()
        request = urllib.request.Request(f"{self._server}/{what}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                return json.load(reply)["output"]
        except urllib.error.HTTPError as error:
            raise EnvironmentLost(f"AppWorld server {self._server} refused /{what} of task {self.task_id!r} with status {error.code}: "
                                  f"{error.read(500).decode(errors='replace')}") from error
        except (OSError, http.client.HTTPException) as error:  # no connection, no answer in time, or half of one
            raise EnvironmentLost(f"AppWorld server {self._server} does not answer /{what} (timeout={self.timeout:g} s): "
                                  f"{getattr(error, 'reason', error)}; start it with: appworld serve environment --port PORT") from error
