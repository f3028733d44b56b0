"""Ray clusters of several processes on this machine: a head of our own, nodes that can be killed, and an autoscaler that starts them."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
from ray.util.state import list_nodes
from running import alive, wait_for_end, wait_until

KEEP_WORKERS = {"num_workers_soft_limit": 8, "idle_worker_killing_time_threshold_ms": 600_000}
BIN = Path(sys.executable).parent


class Provider(FakeMultiNodeProvider):
    """What Ray's own tests take for a cloud: its nodes are processes of this machine. Ray lets a configuration name it in this way only."""


def environment(**variables):
    """Without PYTHONPATH: workers must find the project in the job's working directory."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled", **variables}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it asks for a token
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class Head:
    """A head with its dashboard; a context manager that ends it by its own process id, and everything that it started.

    `node_types`: of an autoscaler, by name: (resources, most of them).
    """

    def __init__(self, cpus=4, node_types=None, idle_minutes=0.1, **variables):
        port, client, agent, web = free_ports(4)
        self.scratch = Path(tempfile.mkdtemp(prefix="rtpo-head-", dir="/tmp"))  # short: Ray puts sockets under it
        self.address, self.dashboard = f"{ray.util.get_node_ip_address()}:{port}", f"http://127.0.0.1:{web}"
        self.environment, self._nodes = environment(**variables), []
        command = [BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client}",
                   f"--dashboard-agent-listen-port={agent}", f"--dashboard-port={web}", "--dashboard-host=127.0.0.1", "--include-dashboard=true",
                   f"--temp-dir={self.scratch}", f"--num-cpus={cpus}", f"--object-store-memory={256 << 20}", "--disable-usage-stats",
                   f"--system-config={json.dumps(KEEP_WORKERS)}"]  # as a local cluster of ours: starting a worker takes as long as a stage
        if node_types:
            command.append(f"--autoscaling-config={self._autoscaling(cpus, node_types, idle_minutes)}")
            self.environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                                 "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID, "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
        self.log = self.scratch / "log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, env=self.environment, cwd=self.scratch, stdout=output, stderr=subprocess.STDOUT,
                                            start_new_session=True)

    def _autoscaling(self, cpus, node_types, idle_minutes):
        kinds = {name: {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most}
                 for name, (resources, most) in node_types.items()}
        unused = {"file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": [],
                  "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
                  "head_start_ray_commands": [], "worker_start_ray_commands": [], "docker": {}, "auth": {}, "upscaling_speed": 1.0}
        config = {**unused, "cluster_name": "test", "max_workers": sum(most for _, most in node_types.values()), "idle_timeout_minutes": idle_minutes,
                  "provider": {"type": "external", "module": "heads.Provider", "gcs_address": self.address, "head_node_id": FAKE_HEAD_NODE_ID,
                               "use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True},
                  "head_node_type": "ray.head.default",
                  "available_node_types": {"ray.head.default": {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": 0}, **kinds}}
        path = self.scratch / "autoscaling.json"
        path.write_text(json.dumps(config))
        return path

    def __enter__(self):
        try:
            wait_until(lambda: self.process.poll() is not None or answers(f"{self.dashboard}/api/version"), 90, f"the dashboard at {self.dashboard}")
            assert self.process.poll() is None, self.log.read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        family = [one for process in (self.process, *self._nodes) for one in _family(process)]
        for process in (self.process, *self._nodes):
            process.kill()  # asked to end, it takes half a minute
        for one in family:
            if alive(one):
                one.kill()
        for process in (self.process, *self._nodes):
            process.wait(60)
        wait_for_end(family, 10)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def add_node(self, resources, cpus=1):
        """A further node, as a process group that `kill_node` ends at once."""
        command = [BIN / "ray", "start", "--block", f"--address={self.address}", f"--num-cpus={cpus}", f"--resources={json.dumps(resources)}",
                   f"--object-store-memory={128 << 20}", "--disable-usage-stats", f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
        with (self.scratch / f"node-{len(self._nodes)}").open("w") as output:
            node = subprocess.Popen(command, env=self.environment, cwd=self.scratch, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self._nodes.append(node)
        return node

    def kill_node(self, node):
        """As a machine that loses its power does."""
        family = _family(node)
        for one in family:
            if alive(one):
                one.kill()
        node.kill()
        node.wait(30)

    def drain(self, node, seconds=300):
        """Tell a node, by its id, that it goes in so many seconds, as a cloud does that wants a machine back."""
        subprocess.run([BIN / "ray", "drain-node", f"--address={self.address}", f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION",
                        "--reason-message=wanted back", f"--deadline-remaining-seconds={seconds}"],
                       env=self.environment, check=True, capture_output=True, timeout=60)

    def nodes(self, resource):
        """Ids of the living nodes that have `resource`."""
        return [node.node_id for node in list_nodes(address=self.dashboard, limit=1000, timeout=30)
                if node.state == "ALIVE" and resource in node.resources_total]


def _family(process):
    try:
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        return []
