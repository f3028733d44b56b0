"""One Ray cluster and one warm-started tiny model for all integration tests: starting either takes as long as a test."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / "tests/unit"), str(ROOT / "tests/integration")]  # of workers, which unpickle what tests define

# Read when torch and Ray are imported. A local Ray with token authentication would write a token into the home directory.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "RAY_AUTH_MODE": "disabled",
               "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(PATHS)}
os.environ.pop("RAY_ADDRESS", None)
sys.path += [path for path in PATHS if path not in sys.path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """(overrides, folder): the configuration of a small run as a command line has it, and its warm-started model."""
    from tests.integration.running import SMALL, warm_start

    return warm_start([*SMALL, f"warm_start.cache={tmp_path_factory.mktemp('models')}"])


@pytest.fixture(scope="session")
def ray_cluster():
    """A local cluster of 4 logical CPUs, shared by all tests."""
    import logging

    import ray

    from actors.cluster import KEEP_WORKERS, quiet_ray_data

    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False, logging_level=logging.WARNING,
             _system_config=KEEP_WORKERS)
    quiet_ray_data()
    yield
    ray.shutdown()


@pytest.fixture
def cluster(ray_cluster):
    """The cluster, without named actors before and after."""
    from tests.integration.running import end_actors

    yield
    end_actors()


@pytest.fixture(scope="session")
def two_sweeps(ray_cluster, tiny_model, tmp_path_factory):
    """(events, folder) of one undisturbed run of the small configuration."""
    from actors.cluster import run_events
    from rtpo_ray.config import load_config
    from tests.integration.running import end_actors

    end_actors()
    overrides, model = tiny_model
    folder = tmp_path_factory.mktemp("two-sweeps")
    return list(run_events(load_config(None, overrides), model, str(folder))), folder


@pytest.fixture
def start(tiny_model, tmp_path):
    """Starts `rtpo COMMAND ...` on the small run; whatever is left of it ends with the test."""
    from tests.integration.running import RTPO, Command

    running = []

    def begin(command, *overrides):
        common = [*tiny_model[0], "cluster.dashboard=false", "cluster.local_cpus=3", f"run.root={tmp_path}"]
        running.append(Command([*RTPO, *command, *common, *overrides]))
        return running[-1]

    yield begin
    for command in running:
        command.end()
