"""How long a loss lasts: from a generator's death, and its node's, until its work runs elsewhere; from a node's joining to its first rollout.

    python tests/bench/recovery.py                  # about ten minutes on two cores; writes results/recovery.json

A real training run on a head and three generator nodes of this machine. Steps of the environment take a second, so that there is always work
under way, and write down when they begin and in which process. "Runs elsewhere" is the first step of a task, which the dead generator had begun
and not finished, in another process; it includes the first response. Every figure is taken several times.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import chaos
from chaos import RESULTS, ROOT, SETTINGS, Disturbed
from ray.util.state import list_actors
from running import wait_until, warm_start
from witness import read


class Witnessed(Disturbed):
    def __init__(self, root: Path, model: str) -> None:
        self.notes = root / "notes"
        self.notes.mkdir()
        super().__init__(root, "recovery", model, [
            f"environment.path={ROOT}/tests/bench/witness.py:Witness", f"environment.args.notes={self.notes}", "environment.args.seconds=1.0",
            "environment.step_timeout=30", "run.sweeps=100000", "run.eval_tasks=0", "generators.min=3", "learner.ranks=1"])

    def busy(self) -> set[int]:
        """Processes that are in the middle of a step."""
        return {process for process in self.processes() if self.unfinished(process)}

    def processes(self) -> dict[int, str]:
        """Node by process of the living generators."""
        return {actor.pid: actor.node_id for actor in list_actors(address=self.head.dashboard, filters=[("state", "=", "ALIVE")], detail=True,
                                                                  limit=1000, timeout=30)
                if (actor.name or "").startswith("rtpo-generator-") and actor.name != "rtpo-generator-pool" and actor.pid}

    def unfinished(self, process: int, seconds: float = 0.7) -> set[int]:
        """Tasks of which this process is in the middle of a step: it began less than `seconds` ago and takes 1 s."""
        return {task for when, who, task, end in read(self.notes) if who == process and not end and when > time.time() - seconds}

    def until_elsewhere(self, victim: int, tasks: set[int], since: float) -> float:
        """Seconds from `since` until one of these tasks has a step in another process."""
        def first():
            return [when for when, process, task, _ in read(self.notes) if process != victim and task in tasks and when > since][:1]
        return wait_until(first, 120, "the lost work to run elsewhere")[0] - since

    def all_at_work(self) -> None:
        wait_until(lambda: len(self.busy()) >= 3, 180, "three generators at work")


def of_generators(run: Witnessed, rng: random.Random, count: int) -> list[float]:
    found = []
    for _ in range(count):
        run.all_at_work()
        victim = rng.choice(sorted(run.busy()))
        tasks, since = run.unfinished(victim), time.time()
        chaos.psutil.Process(victim).kill()
        if tasks:
            found.append(run.until_elsewhere(victim, tasks, since))
            print("generator death", round(found[-1], 2), flush=True)
    return found


def of_nodes(run: Witnessed, count: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds after the death of a node; from the start of another to its registration; from there to its first step."""
    lost, registered, joined = [], [], []
    for _ in range(count):
        run.all_at_work()
        before = set(run.head.nodes("generator"))
        node = run.nodes.pop(0)
        doomed = {pid for pid in run.processes() if pid in {child.pid for child in chaos.psutil.Process(node.pid).children(recursive=True)}}
        (victim,) = doomed
        tasks = wait_until(lambda process=victim: run.unfinished(process, 0.2), 60, "a step that has just begun")  # to kill a node takes a while
        since = time.time()
        run.head.kill_node(node)
        try:
            lost.append(run.until_elsewhere(victim, tasks, since))
            print("node death", round(lost[-1], 2), flush=True)
        except TimeoutError:  # its steps were over, and delivered, before all of the node was dead: there was nothing to run elsewhere
            print("node death missed", flush=True)
        started = time.time()
        run.nodes.append(run.head.add_node({"generator": 1}))
        (new,) = wait_until(lambda known=before: set(run.head.nodes("generator")) - known, 90, "the new node")
        there = time.time()
        registered.append(there - started)
        pid = wait_until(lambda node=new: [pid for pid, where in run.processes().items() if where == node], 120, "its generator")[0]
        first = wait_until(lambda process=pid: [when for when, who, _, _ in read(run.notes) if who == process][:1], 120, "its first step")[0]
        joined.append(first - there)
        print("node joined", round(registered[-1], 2), round(joined[-1], 2), flush=True)
    return lost, registered, joined


def summary(values: list[float]) -> dict:
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2), "times": len(values),
            "all": [round(value, 2) for value in values]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=5)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rtpo-recovery-"))
    _, model = warm_start(SETTINGS)
    run = Witnessed(root, model)
    try:
        killed = of_generators(run, random.Random(0), args.generators)
        lost, registered, joined = of_nodes(run, args.nodes)
    except BaseException:
        print(run.command.text)
        raise
    finally:
        run.close()
        shutil.rmtree(root, ignore_errors=True)
    taken = {"generator death to its work elsewhere, s": killed, "node death to its work elsewhere, s": lost,
             "start of a node to its registration, s": registered, "registration to its first rollout's first step, s": joined}
    found = {what: summary(values) for what, values in taken.items() if values}
    path = RESULTS / "recovery.json"
    RESULTS.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}  # what is not taken this time stays
    path.write_text(json.dumps(known | found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
