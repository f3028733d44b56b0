"""Generator nodes that come and go in the middle of a run, by an autoscaler that starts and ends them, and by sudden death."""

import json
import os
import threading

import psutil
from faulty import open_gate, shut_gate
from heads import Head
from ray.util.state import list_actors
from running import RTPO, Command, wait_until
from test_failures import FAULTY, conserved


def events_of(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Census(threading.Thread):
    """How many living nodes have a resource, again and again; each number when it changes."""

    def __init__(self, head, resource):
        super().__init__(daemon=True)
        self.head, self.resource, self.counts, self.over = head, resource, [], threading.Event()

    def run(self):
        while not self.over.wait(0.5):
            count = len(self.head.nodes(self.resource))
            if count != (self.counts or [None])[-1]:
                self.counts.append(count)


def generators(head):
    """Nodes of the living generators."""
    return [actor.node_id for actor in list_actors(address=head.dashboard, filters=[("state", "=", "ALIVE")], detail=True, timeout=30)
            if actor.class_name == "GeneratorActor"]


def kill_fake_node(node):
    """Every process of a node that the autoscaler made, at once."""
    found = [one for one in psutil.process_iter() if environment_of(one).get("RAY_OVERRIDE_NODE_ID_FOR_TESTING") == node]
    for one in found:
        one.kill()
    return found


def environment_of(process):
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


def test_nodes_come_for_the_work_go_without_it_and_die_without_warning(tiny_model, tmp_path):
    """The learner's node is the head. A step that waits makes a stage as long as it takes a node to come, or to go."""
    overrides, model = tiny_model
    faults, folder = tmp_path / "faults", tmp_path / "elastic"
    faults.mkdir()
    node = {"CPU": 1, "generator": 1, "object_store_memory": 128 << 20}
    with Head(cpus=3, node_types={"generator": (node, 3)}, PYTHONPATH=os.environ["PYTHONPATH"], AUTOSCALER_HEARTBEAT_TIMEOUT_S="5") as head:
        census = Census(head, "generator")
        census.start()
        training = Command([*RTPO, "train", *overrides, f"cluster.address={head.address}", "cluster.autoscaling=true", "run.name=elastic",
                            f"run.root={tmp_path}", "run.sweeps=2", "run.eval_tasks=0", f"model.path={model}", FAULTY,
                            f"environment.args.faults={faults}", "environment.step_timeout=240", "sampling.stage_timeout=300",
                            "generators.resource=generator",
                            "generators.min=1", "generators.max=3", "generators.release=true", "generators.max_num_seqs=48"])
        try:
            def stage(sweep, turn):
                def there():
                    assert training.process.poll() is None, training.text
                    return any((event["kind"], event["sweep"], event.get("turn")) == ("stage", sweep, turn) for event in events_of(folder))
                wait_until(there, 150, f"sweep {sweep}, turn {turn}")

            stage(0, 2)
            shut_gate(faults)  # in turn 1, with 128 siblings for three generators
            wait_until(lambda: len(generators(head)) == 3, 90, "three generators")
            open_gate(faults)
            stage(0, 0)
            shut_gate(faults)  # in the trunks, 32 for one generator
            wait_until(lambda: len(head.nodes("generator")) == 1, 60, "one node")
            open_gate(faults)
            stage(1, 2)
            shut_gate(faults)
            first = generators(head)[0]
            head.drain(first)  # it finishes what it has, which is that step, while others come
            second = min(wait_until(lambda: set(generators(head)) - {first}, 60, "another generator"))
            killed = kill_fake_node(second)
            wait_until(lambda: set(generators(head)) - {first, second}, 90, "one more generator")
            open_gate(faults)
            assert training.finish(240) == 0, training.text
        finally:
            training.end()
            census.over.set()
            census.join(10)
    events = events_of(folder)
    assert census.counts[0] == 0 and max(census.counts) == 3 and 1 in census.counts[census.counts.index(3):] and killed
    conserved(events)
    done = [(event["kind"], event["sweep"], event.get("turn")) for event in events]
    assert len(done) == len(set(done)) and {kind for kind, *_ in done} == {"stage", "sweep"}  # nothing was resumed or done again
    assert not any(event["failed"] for event in events)
    version = 0
    for event in (event for event in events if event["kind"] == "stage"):
        assert event["weight_version"] == version  # the coordinator refuses a stage with samples of any other
        version += event["optimizer_steps"]
    assert version >= 3
    reasons = [reason for event in events for reason in event["retired"].values()]
    assert reasons.count("not needed") >= 2 and "its node is drained" in reasons and any(
        kind in reason for kind in ("ActorUnavailableError", "ActorDiedError", "died: ") for reason in reasons)
