"""Losses in the middle of a run on real parts: it ends as the undisturbed one did, to the last bit of the weights."""

import json
import os
import re
import signal

import ray
import torch
from running import RTPO, Command, wait_for_end
from transformers import AutoModelForCausalLM

from actors.cluster import run_events
from rtpo_ray.config import load_config
from rtpo_ray.ledger import Ledger

TELLING = ("kind", "sweep", "turn", "tasks", "groups", "siblings", "success", "success_greedy", "trunk_success", "weight_version", "generated_tokens",
           "trained", "filtered", "failed", "optimizer_steps", "refused", "trained_tokens", "tokens", "malformed_calls", "zero_advantage_rate")


def told(events):
    """What a run amounts to: nothing of when, by whom and how fast."""
    return [{name: event[name] for name in TELLING if name in event} for event in events if event["kind"] != "resume"]


def assert_same_run(events, folder, two_sweeps):
    """The events are those of the undisturbed run, and so are the weights that it ends with."""
    expected, other = two_sweeps
    assert told(events) == told(expected)
    one, two = (AutoModelForCausalLM.from_pretrained(path / "final").state_dict() for path in (folder, other))
    for name, tensor in one.items():  # blocks may come to the learner in another order, so gradients agree to rounding only
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-4)


def stop_process(name):
    """Kill the process of an actor from outside, as the kernel's memory killer does."""
    pid = ray.get(ray.get_actor(name).__ray_call__.remote(lambda self: os.getpid()), timeout=30)
    os.kill(pid, signal.SIGKILL)


def test_learner_generator_and_coordinator_are_lost_one_after_the_other(cluster, tiny_model, two_sweeps, tmp_path):
    overrides, model = tiny_model
    events, resumed = [], []
    victims = {(0, 2): "rtpo-learner-0", (0, 0): "rtpo-generator-1", (1, 1): "rtpo-coordinator"}
    for event in run_events(load_config(None, overrides), model, str(tmp_path)):
        if event["kind"] == "resume":
            resumed.append(event)
            with Ledger(tmp_path) as ledger:
                events = [kept for kept in ledger.events() if kept["time"] < event["time"]]
        events.append(event)
        if event["kind"] == "stage" and (victim := victims.pop((event["sweep"], event["turn"]), "")):
            stop_process(victim)
    assert_same_run(events, tmp_path, two_sweeps)
    reasons = [event["reason"] for event in resumed]
    assert len(reasons) == 2 and "a learner rank was lost" in reasons[0] and "the coordinator was lost" in reasons[1]
    with Ledger(tmp_path) as ledger:
        assert ledger.events() == events and ledger.progress.finished
    assert "rtpo-generator-1" in {name for event in events for name in event.get("retired", {})}


def test_a_killed_command_is_resumed(start, tiny_model, two_sweeps, tmp_path):
    folder = tmp_path / "killed"
    training = start(["train"], "run.name=killed")
    training.wait_for("  turn 1 ", 240)
    actors = [process for process in training.family() if re.match(r"ray::(Generator|Learner|Coordinator)", process.name())]
    training.process.kill()
    assert training.finish(30) == -signal.SIGKILL
    assert len(actors) >= 4 and wait_for_end(actors, 60) == []  # whoever computes ends with the driver
    before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in before][-1] == "stage" and not (folder / "final").exists()

    again = start(["train"], "run.name=killed")
    assert again.finish(60) == 2 and f"go on with it: rtpo train --resume {folder}" in again.text
    wrong = Command([*RTPO, "train", "--resume", str(folder), "learner.lr=1"])
    assert wrong.finish(60) == 2 and "field learner.lr is 1.0 and was 0.0003 when the run began; a resumed run may change" in wrong.text

    # One thing after the other, and every sample by itself: slower, and the same run.
    resumed = Command([*RTPO, "train", "--resume", str(folder), "cluster.dashboard=false", "run.overlap=false", "learner.share_prefixes=false"])
    try:
        assert resumed.finish(240) == 0, resumed.text
    finally:
        resumed.end()
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert_same_run(events, folder, two_sweeps)
    (resume,) = [event for event in events if event["kind"] == "resume"]
    assert (resume["sweep"], resume["reason"], resume["undone"]) == (0, "the run was started again", 0 if resume["stage"] == 2 else 1)
    assert told(events)[: len(before)] == told(before)

    done = Command([*RTPO, "train", "--resume", str(folder)])
    assert done.finish(60) == 2 and "the run is finished, after 2 sweeps" in done.text
