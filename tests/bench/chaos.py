"""Faults at random in a real run, and a kill at every stage of one; each compared with the same run undisturbed.

    python tests/bench/chaos.py faults --seed 0     # at least 12 sweeps and 16 faults of all kinds; writes results/chaos-faults-0.json
    python tests/bench/chaos.py stages              # driver, coordinator and whole cluster, killed in the middle of every step

Real Ray with a head and three generator nodes, real vLLM, a real learner; the model is the tiny one. Takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = PATHS = [str(ROOT), str(ROOT / "tests/unit"), str(ROOT / "tests/integration")]
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
               "PYTHONPATH": os.pathsep.join(PATHS)}
os.environ.pop("RAY_ADDRESS", None)

import psutil  # noqa: E402 - the variables above are read when Ray is imported
import ray  # noqa: E402
from faulty import plant  # noqa: E402
from heads import Head  # noqa: E402
from pyarrow import feather  # noqa: E402
from ray.util.state import list_actors  # noqa: E402
from running import RTPO, SMALL, Command, wait_until, warm_start  # noqa: E402

SETTINGS = [*SMALL, "warm_start.steps=300", "learner.lr=5e-4"]  # a model that knows something, and learns
RESULTS = Path(__file__).parent / "results"
NODES = 3
PATIENCE = 300.0  # seconds without a new step after which a run is given up


class Disturbed:
    """A run on a cluster of its own, watched by its files; what starts it again starts it with the same line."""

    def __init__(self, root: Path, name: str, model: str, overrides: list[str]) -> None:
        self.root, self.folder, self.faults = root, root / name, root / f"{name}-faults"
        self.faults.mkdir()
        self.words = ["train", *SETTINGS, f"model.path={model}", f"environment.path={ROOT}/tests/integration/faulty.py:Faulty",
                      f"environment.args.faults={self.faults}", "environment.step_timeout=3", "generators.resource=generator", "generators.min=2",
                      "generators.max=3", "generators.lost_after=10", "generators.max_num_seqs=48", "weights.timeout=5", "cluster.lost_after=10",
                      "learner.ranks=2", "cluster.restarts=5", "run.resume=true", f"run.root={root}", f"run.name={name}", *overrides]
        self.tasks: dict[int, list[str]] = {}  # of every sweep, as they were sampled
        self.log: list[str] = []
        self.open_cluster()
        self.start()

    def open_cluster(self) -> None:
        self.head = Head(cpus=4, PYTHONPATH=os.environ["PYTHONPATH"])
        self.head.__enter__()
        self.nodes = []
        for count in range(NODES):
            self.nodes.append(self.head.add_node({"generator": 1}))
            wait_until(lambda wanted=count + 1: len(self.head.nodes("generator")) == wanted, 60, "a generator node")

    def start(self) -> None:
        self.command = Command([*RTPO, *self.words, f"cluster.address={self.head.address}"])

    def close(self) -> None:
        self.command.end()
        self.head.__exit__()

    def events(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def done(self) -> int:
        """Stages and sweeps that are finished."""
        return sum(event["kind"] in ("stage", "sweep") for event in self.events())

    def look(self) -> None:
        """The task ids of the sweep under way, once its trunks are kept whole."""
        stages = [event for event in self.events() if event["kind"] in ("stage", "sweep")]
        if stages and stages[-1]["kind"] == "stage" and stages[-1]["sweep"] not in self.tasks:
            files = (self.folder / "trunks" / f"sweep-{stages[-1]['sweep']:06d}").glob("*.arrow")
            try:
                found = sorted(task for file in files for task in feather.read_table(file)["task_id"].to_pylist())
            except FileNotFoundError:  # the sweep has just ended
                return
            if found:
                self.tasks[stages[-1]["sweep"]] = found

    def wait_for(self, steps: int) -> bool:
        """Until so many steps are done; whether there is still something to disturb. A run that failed or stands still is an error."""
        last, since = -1, time.monotonic()
        while (now := self.done()) < steps:
            self.look()
            if now != last:
                last, since = now, time.monotonic()
            if self.command.process.poll() is not None:
                if self.command.process.returncode == 0:
                    return False
                raise RuntimeError(f"the run ended with exit code {self.command.process.returncode}:\n{self.command.text}")
            if time.monotonic() - since > PATIENCE:
                raise RuntimeError(f"no new step in {PATIENCE:g} s:\n{self.command.text}")
            time.sleep(0.05)
        self.look()
        return True

    def finish(self) -> list[dict]:
        self.wait_for(10**9)
        return self.events()

    # --- who there is

    def pid(self, pattern: str, rng: random.Random) -> psutil.Process:
        """The process of a living actor with such a name."""
        def living() -> list[int]:
            return [actor.pid for actor in list_actors(address=self.head.dashboard, filters=[("state", "=", "ALIVE")], limit=1000, timeout=30)
                    if re.fullmatch(pattern, actor.name or "") and actor.pid]
        return psutil.Process(rng.choice(wait_until(living, 120, f"an actor {pattern}")))

    # --- what is done to them

    def rollout_error(self, rng: random.Random) -> None:
        plant(self.faults, "raise")

    def poisoned_sample(self, rng: random.Random) -> None:
        plant(self.faults, "nan")

    def environment_hang(self, rng: random.Random) -> None:
        plant(self.faults, "hang")

    def environment_kills_its_generator(self, rng: random.Random) -> None:
        plant(self.faults, "die")

    def generator_death(self, rng: random.Random) -> None:
        self.pid(r"rtpo-generator-\d+", rng).kill()

    def generator_stands_still(self, rng: random.Random) -> None:
        self.pid(r"rtpo-generator-\d+", rng).send_signal(signal.SIGSTOP)

    def generator_death_in_a_push(self, rng: random.Random) -> None:
        victim = self.pid(r"rtpo-generator-\d+", rng)
        ray.init(address=self.head.address, logging_level="ERROR", log_to_driver=False)
        try:
            named = {entry["name"]: entry["namespace"] for entry in ray.util.list_named_actors(all_namespaces=True)}
            coordinator = ray.get_actor("rtpo-coordinator", named["rtpo-coordinator"])
            wait_until(lambda: "weights to the generators" in ray.get(coordinator.doing.remote(), timeout=30)[0], 120, "a push")
            victim.kill()
        finally:
            ray.shutdown()

    def pool_death(self, rng: random.Random) -> None:
        self.pid("rtpo-generator-pool", rng).kill()

    def pool_stands_still(self, rng: random.Random) -> None:
        self.pid("rtpo-generator-pool", rng).send_signal(signal.SIGSTOP)

    def node_death(self, rng: random.Random) -> None:
        self.head.kill_node(self.nodes.pop(rng.randrange(len(self.nodes))))
        self.nodes.append(self.head.add_node({"generator": 1}))

    def learner_rank_death(self, rng: random.Random) -> None:
        self.pid(r"rtpo-learner-\d+", rng).kill()

    def coordinator_death(self, rng: random.Random) -> None:
        self.pid("rtpo-coordinator", rng).kill()

    def coordinator_stands_still(self, rng: random.Random) -> None:
        self.pid("rtpo-coordinator", rng).send_signal(signal.SIGSTOP)

    def driver_death(self, rng: random.Random) -> None:
        self.command.process.kill()
        self.command.process.wait(30)
        self.start()

    def full_disk(self, rng: random.Random) -> None:
        """No file of a learner rank may grow beyond 1000 bytes until a checkpoint has failed of it."""
        victims = [self.pid(f"rtpo-learner-{rank}", rng) for rank in range(2)]
        for one in victims:
            one.rlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        before = self.done()
        self.wait_for(before + 3)
        for one in victims:
            if one.is_running():
                one.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def cluster_death(self, rng: random.Random) -> None:
        self.head.__exit__()
        self.command.process.wait(120)
        self.open_cluster()
        self.start()


# Each happens at least once, in an order of chance.
KINDS = ("rollout_error", "poisoned_sample", "environment_hang", "environment_kills_its_generator", "generator_death", "generator_stands_still",
         "generator_death_in_a_push", "pool_death", "pool_stands_still", "node_death", "learner_rank_death", "coordinator_death",
         "coordinator_stands_still", "driver_death", "full_disk", "cluster_death")


def conservation(events: list[dict]) -> dict[str, int]:
    """Of all stages; raises when one does not add up."""
    total = dict.fromkeys(("produced", "trained", "filtered", "failed"), 0)
    for event in (event for event in events if event["kind"] == "stage"):
        parts = {"produced": event["siblings"], "trained": event["trained"], "filtered": sum(event["filtered"].values()),
                 "failed": sum(event["failed"].values())}
        assert parts["produced"] == parts["trained"] + parts["filtered"] + parts["failed"], event
        total = {key: total[key] + parts[key] for key in total}
    return total


def evaluations(events: list[dict]) -> list[tuple[int, float]]:
    return [(event["sweep"], event["success"]) for event in events if event["kind"] == "eval"]


def versions(events: list[dict]) -> list[tuple[int, int, int]]:
    """(sweep, turn, weight version) of every stage."""
    return [(event["sweep"], event["turn"], event["weight_version"]) for event in events if event["kind"] == "stage"]


def undisturbed(root: Path, model: str, overrides: list[str]) -> tuple[list[dict], dict[int, list[str]]]:
    run = Disturbed(root, "undisturbed", model, overrides)
    try:
        return run.finish(), run.tasks
    finally:
        run.close()


def faults(root: Path, model: str, seed: int, sweeps: int, count: int) -> dict:
    overrides = [f"run.sweeps={sweeps}", "run.eval_tasks=256", f"run.seed={seed}"]
    plain, tasks = undisturbed(root, model, overrides)
    rng = random.Random(seed)
    kinds = [*KINDS, *rng.choices(KINDS, k=max(0, count - len(KINDS)))]
    rng.shuffle(kinds)
    steps = sum(event["kind"] in ("stage", "sweep") for event in plain)
    moments = sorted(rng.sample(range(1, steps - 5), len(kinds)))  # a full disk shows within three steps
    run, happened = Disturbed(root, "disturbed", model, overrides), []
    try:
        for moment, kind in zip(moments, kinds, strict=True):
            assert run.wait_for(moment), "the run ended before all that was to happen to it"
            time.sleep(rng.random())
            print(f"{len(happened) + 1}. after step {run.done()}: {kind}", flush=True)
            happened.append({"step": run.done(), "kind": kind})
            getattr(run, kind)(rng)
        events = run.finish()
    except BaseException:
        print(run.command.text, flush=True)
        raise
    finally:
        run.close()
    (_, before), (_, expected) = evaluations(plain)
    (_, again), (_, found) = evaluations(events)
    error = math.sqrt(2 * expected * (1 - expected) / 256)
    return {"seed": seed, "sweeps": sweeps, "faults": happened, "steps": run.done(), "conservation": conservation(events),
            "tasks_equal": run.tasks == tasks and len(tasks) == sweeps, "resumes": [e["reason"] for e in events if e["kind"] == "resume"],
            "retired": [reason.partition("\n")[0][:160] for e in events for reason in e.get("retired", {}).values()],
            "unsaved": [e["unsaved"][:160] for e in events if e["unsaved"]],
            "failed": sum(sum(e.get("failed", {}).values()) for e in events), "versions": versions(events)[-1][2],
            "success_before": before, "success_before_again": again, "success_undisturbed": expected, "success_disturbed": found,
            "two_standard_errors": 2 * error, "in_band": abs(found - expected) <= 2 * error,
            "seconds_undisturbed": plain[-1]["time"] - plain[0]["time"], "seconds_disturbed": events[-1]["time"] - events[0]["time"]}


def stages(root: Path, model: str, seed: int) -> dict:
    """Every step of two sweeps is killed in its middle once: the trunks and every turn."""
    overrides = ["run.sweeps=2", "run.eval_tasks=32", f"run.seed={seed}"]
    plain, tasks = undisturbed(root, model, overrides)
    steps = sum(event["kind"] in ("stage", "sweep") for event in plain)
    rng, killed = random.Random(seed), []
    run = Disturbed(root, "killed", model, overrides)
    try:
        for step in range(steps):
            wait_until(lambda: run.events() or run.command.process.poll() is not None, 240, "the first evaluation")
            run.wait_for(step)
            kind = ("driver_death", "coordinator_death", "cluster_death")[step % 3]
            if kind == "coordinator_death":
                run.pid("rtpo-coordinator", rng)
            time.sleep(0.1 + 0.5 * rng.random())
            print(f"step {step}: {kind}", flush=True)
            killed.append({"step": step, "kind": kind, "after": run.done()})
            getattr(run, kind)(rng)
            resumes = sum(event["kind"] == "resume" for event in run.events())
            wait_until(lambda before=resumes: sum(event["kind"] == "resume" for event in run.events()) > before, 240, "the run to go on")
        events = run.finish()
    finally:
        run.close()
    return {"seed": seed, "killed": killed, "tasks_equal": run.tasks == tasks and len(tasks) == 2,
            "versions_equal": versions(events) == versions(plain), "evaluations_equal": evaluations(events) == evaluations(plain),
            "tasks": sum(map(len, tasks.values())), "versions": versions(plain), "evaluations": evaluations(plain),
            "task_ids_that_differ": {sweep: [tasks.get(sweep), run.tasks.get(sweep)] for sweep in (*tasks, *run.tasks)
                                     if tasks.get(sweep) != run.tasks.get(sweep)},
            "undone": [event["undone"] for event in events if event["kind"] == "resume"], "conservation": conservation(events)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "stages"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweeps", type=int, default=12)
    parser.add_argument("--faults", type=int, default=16)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rtpo-chaos-"))
    _, model = warm_start(SETTINGS)
    try:
        found = faults(root, model, args.seed, args.sweeps, args.faults) if args.what == "faults" else stages(root, model, args.seed)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"chaos-{args.what}-{args.seed}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    traces = args.what == "stages" or all(found[trace] for trace in ("retired", "unsaved")) and len(found["resumes"]) >= 6
    good = traces and all(found.get(claim, True) for claim in ("tasks_equal", "in_band", "versions_equal", "evaluations_equal"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
