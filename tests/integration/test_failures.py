"""What may go wrong in the middle of a run goes wrong, on real parts, one after the other: each is said, and costs what the README says."""

import os
import resource
import signal

import psutil
import ray
from faulty import plant
from running import ROOT, wait_until

from actors.cluster import run_events
from rtpo_ray.config import load_config
from rtpo_ray.ledger import Ledger

FAULTY = f"environment.path={ROOT / 'tests/integration/faulty.py'}:Faulty"


def process(name):
    """The process of an actor."""
    return psutil.Process(ray.get(ray.get_actor(name).__ray_call__.remote(lambda self: os.getpid()), timeout=30))


def conserved(events):
    for event in (event for event in events if event["kind"] == "stage"):
        assert event["groups"] * 4 == event["siblings"] == event["trained"] + sum(event["filtered"].values()) + sum(event["failed"].values())


def test_environments_that_raise_hang_or_poison_a_full_disk_and_a_rank_that_dies(cluster, tiny_model, tmp_path):
    overrides, model = tiny_model
    faults, folder = tmp_path / "faults", tmp_path / "run"
    faults.mkdir()
    folder.mkdir()
    config = load_config(None, [*overrides, FAULTY, f"environment.args.faults={faults}", "environment.step_timeout=2", "sampling.retries=0",
                                "learner.ranks=2", "cluster.local_cpus=4", "run.sweeps=3", "run.eval_tasks=0"])
    plant(faults, "raise", "nan", "hang")
    events, limited = [], []
    for event in run_events(config, model, str(folder)):
        events.append(event)
        if event["kind"] == "sweep" and event["sweep"] == 0:
            plant(faults, "die")
            limited = [process(f"rtpo-learner-{rank}") for rank in range(2)]
            for one in limited:
                one.rlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # no file may grow beyond 1000 bytes: the disk is full
        if limited and event["unsaved"]:
            for one in limited:
                one.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            limited = []
            process("rtpo-learner-1").send_signal(signal.SIGKILL)
    conserved(events)
    with Ledger(folder) as ledger:
        kept, progress = ledger.events(), ledger.progress
    assert progress.finished and kept[-1] == events[-1] and [event["sweep"] for event in kept if event["kind"] == "sweep"] == [0, 1, 2]

    first = next(event for event in events if event["kind"] == "sweep")
    assert sum(first["failed"].values()) == 3
    for part in ("OSError: the tool's server is gone", "ValueError: Faulty.step returned reward nan at turn ",
                 "TimeoutError: Faulty.step took longer than environment.step_timeout (2 s) at turn "):
        (message,) = [message for message in first["failed"] if part in message]
        assert first["failed"][message] == 1 and first["failed_first"][message]
    (died,) = [reason for event in events for reason in event.get("retired", {}).values()]
    assert "RayActorError" in died or "ActorDiedError" in died or "died" in died
    (unsaved,) = [event["unsaved"] for event in events if event["unsaved"]]
    assert unsaved.startswith(f"{folder}/states/") and "could not be written" in unsaved and "File too large" in unsaved
    (resumed,) = [event for event in events if event["kind"] == "resume"]
    assert "a learner rank was lost" in resumed["reason"] and resumed["sweep"] == 1 and resumed["undone"] <= 3


def test_a_coordinator_that_stands_still_is_replaced_and_so_is_a_pool_that_dies(cluster, tiny_model, tmp_path):
    overrides, model = tiny_model
    config = load_config(None, [*overrides, "run.sweeps=1", "run.eval_tasks=0", "cluster.lost_after=5"])
    events, victims = [], [("rtpo-coordinator", signal.SIGSTOP), ("rtpo-generator-pool", signal.SIGKILL)]
    for event in run_events(config, model, str(tmp_path)):
        events.append(event)
        if event["kind"] == "stage" and victims:
            name, how = victims.pop(0)
            process(name).send_signal(how)
    first, second = [event for event in events if event["kind"] == "resume"]
    assert first["reason"].startswith(
        "the coordinator was lost: the coordinator did not answer for 5 s; the last that the coordinator said: sweep 0, ")
    assert second["reason"].startswith("the coordinator was lost: ")
    assert [event["sweep"] for event in events if event["kind"] == "sweep"] == [0]
    wait_until(lambda: not ray.util.list_named_actors(), 30, "the end of the actors")
