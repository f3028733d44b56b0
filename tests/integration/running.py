"""What the tests of whole runs share: a small configuration, waiting with a deadline, and ending what a test started."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from actors.gang import LEARNERS
from rtpo_ray.config import load_config

ROOT = Path(__file__).parents[2]
RTPO = [sys.executable, "-m", "rtpo_ray"]

SMALL = (
    "run.sweeps=2", "run.eval_tasks=16", "run.eval_every=0", "run.seed=3",
    "warm_start.steps=60", "warm_start.batch=32", "warm_start.noise=0.4",
    "environment.name=lookup", "environment.args.hops=1", "environment.args.entities=3", "environment.max_turns=3",
    "algorithm.args.n_siblings=4", "sampling.tasks_per_sweep=32", "sampling.max_response_tokens=24", "sampling.stage_timeout=120",
    "generators.min=2", "generators.cpus=0.25", "generators.max_model_len=160", "generators.max_num_seqs=64", "generators.kv_cache_mb=16",
    "learner.cpus=0.5", "learner.lr=3e-4", "learner.timeout=120", "weights.timeout=30",
)


def warm_start(overrides):
    """(overrides, folder) of the tiny model that the overrides describe."""
    from rtpo_ray.policy.tiny import materialise

    return list(overrides), str(materialise(load_config(None, overrides), lambda line: None))


def wait_until(condition, seconds, what):
    """Poll until `condition()` is true; returns its value."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.05)
    return value


def end_actors():
    """Kill every named actor, and wait until their names are free again, and that of the learners' places."""
    for name in ray.util.list_named_actors():
        try:
            ray.kill(ray.get_actor(name))
        except ValueError:  # it has ended meanwhile
            continue
    wait_until(lambda: not ray.util.list_named_actors(), 30, f"the end of {ray.util.list_named_actors()}")
    if places_of_learners() is not None:
        remove_placement_group(places_of_learners())
    wait_until(lambda: places_of_learners() is None, 30, "the end of the learners' placement group")


def places_of_learners():
    """Their placement group, if there is one."""
    try:
        return get_placement_group(LEARNERS)
    except ValueError:
        return None


def alive(process):
    """Whether a psutil process still runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(processes, seconds):
    """Those that still run after `seconds`."""
    until = time.monotonic() + seconds
    while (left := [process for process in processes if alive(process)]) and time.monotonic() < until:
        time.sleep(0.1)
    return left


class Command:
    """A process in a session of its own, as a terminal gives it, also where the tests run in the background, where an interrupt is ignored; its
    output is read as it comes."""

    def __init__(self, argv):
        self.process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
        self.lines, self._more = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()

    def wait_for(self, start, seconds):
        """The first line that begins with `start`."""
        with self._more:
            found = self._more.wait_for(lambda: [line for line in self.lines if line.startswith(start)], seconds)
        assert found, f"no line {start!r} within {seconds} s:\n" + self.text
        return found[0]

    def finish(self, seconds):
        """Exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {seconds} s:\n{self.text}")

    @property
    def text(self):
        return "\n".join(self.lines)

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self):
        if self.process.poll() is None:
            left = self.family()
            self.process.kill()
            for one in left:
                if alive(one):
                    one.kill()
        self.process.wait(30)
