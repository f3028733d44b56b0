"""`ray job submit` from a clean directory to a cluster that does not know the project."""

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
import pytest
from running import SMALL, wait_for_end, wait_until
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]


def environment():
    """Without PYTHONPATH: workers must find the project in the job's working directory."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}


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
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    """Address of the dashboard of a head node of our own, which ends by its own process id."""
    port, client, agent, web = free_ports(4)
    scratch = Path(tempfile.mkdtemp(prefix="rtpo-head-", dir="/tmp"))  # short: Ray puts sockets under it
    log = tmp_path_factory.mktemp("head") / "log"
    command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client}",
               f"--dashboard-agent-listen-port={agent}", f"--dashboard-port={web}", "--dashboard-host=127.0.0.1", "--include-dashboard=true",
               f"--temp-dir={scratch}", "--num-cpus=4", f"--object-store-memory={256 << 20}", "--disable-usage-stats"]
    with log.open("w") as output:
        head = subprocess.Popen(command, env=environment(), cwd=scratch, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{web}"
    try:
        wait_until(lambda: head.poll() is not None or answers(f"{address}/api/version"), 90, f"the dashboard at {address}")
        assert head.poll() is None, log.read_text()
        yield address
    finally:
        family = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.terminate()
        head.wait(60)
        for one in wait_for_end(family, 5):  # Ray leaves a helper behind now and then
            one.kill()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory):
    """The project's files as a fresh clone of the working tree would have them."""
    target = tmp_path_factory.mktemp("clean")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def submit(address, folder, *overrides):
    """`ray job submit`: (exit code, everything it printed, logs of the job included)."""
    command = ["ray", "job", "submit", "--address", address, "--working-dir", ".", "--", "python", "-m", "rtpo_ray", "train",
               "--config", "conf/quickstart.yaml", *overrides]
    done = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    return done.returncode, done.stdout


def test_the_quickstart_as_a_job(dashboard, clean_copy, tiny_model, tmp_path):
    code, output = submit(dashboard, clean_copy, *tiny_model[0], "run.sweeps=1", "run.name=job", f"run.root={tmp_path}")
    assert code == 0, output
    assert "sweep 1/1  trunks " in output and "run finished: " in output
    assert (tmp_path / "job" / "metrics.jsonl").read_text().count('"kind": "eval"') == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "job" / "final").num_parameters() > 1e5


def test_a_broken_configuration_fails_the_job_with_its_message(dashboard, clean_copy, tmp_path):
    code, output = submit(dashboard, clean_copy, *SMALL, "algorithm.args.n_siblings=1", f"run.root={tmp_path}")
    assert code == 1, output
    assert "rtpo: configuration error: field algorithm.args.n_siblings is 1; expected at least 2 (one sibling is its own baseline" in output
    assert "Traceback" not in output and list(tmp_path.iterdir()) == []
