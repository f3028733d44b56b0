"""What a stage costs the coordinator, by the number of siblings and of generators, with generators that do nothing.

    python tests/bench/coordinator.py               # about five minutes on two cores; writes results/coordinator.json

The coordinator, the pool, Ray Data and the counting of samples are the real ones. Generators answer at once with copies of one rollout; the
learner counts its samples and makes no step. Measured are CPU seconds and resident memory of the coordinator's process, in which Ray Data's
executor runs, and of the pool's. At most 24 blocks are sampled at once, each by a process, so that all fits a machine of 24 GiB.
"Logical" generators are members of the pool that share a few processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
sys.path[:0] = PATHS = [str(ROOT), str(ROOT / "tests/bench")]
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(PATHS), "RAY_DATA_LOG_LEVEL": "ERROR"}
os.environ.pop("RAY_ADDRESS", None)

import psutil  # noqa: E402 - the variables above are read when Ray is imported
import pytest  # noqa: E402
import ray  # noqa: E402
from noop import NoopGenerator, NoopRank  # noqa: E402

from actors.cluster import KEEP_WORKERS, quiet_ray_data  # noqa: E402
from actors.coordinator import Coordinator  # noqa: E402
from actors.gang import Taken  # noqa: E402
from actors.pool import GeneratorPool, PoolLimits  # noqa: E402
from actors.publisher import AsLoaded  # noqa: E402
from pipelines.counts import StageCounts  # noqa: E402
from rtpo_ray import algorithms  # noqa: E402
from rtpo_ray.config import load_config  # noqa: E402
from rtpo_ray.types import UpdateResult  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SIBLINGS = 16
EACH = 256  # rollouts that a generator samples at once, the default
# (generators, processes that they share, siblings of a stage)
CASES = ((8, 8, 1_000), (8, 8, 10_000), (8, 8, 100_000), (32, 32, 10_000), (32, 32, 100_000), (64, 64, 20_000), (64, 64, 100_000),
         (256, 32, 100_000))


class NoopGang:
    """A learner that takes samples and learns nothing."""

    def __init__(self) -> None:
        self.ranks = [ray.remote(NoopRank).options(num_cpus=0).remote()]

    def take(self, blocks, stream):
        fed = [self.ranks[0].receive.remote(block) for block in blocks]
        return Taken(counts=sum(ray.get(fed, timeout=600), StageCounts()), waited=0.0, overlapped=0.0)

    def update(self, n_groups, n_rollouts, seed):
        return UpdateResult(loss=0.0, grad_norm=0.0, logprob_gap_mean=0.0, logprob_gap_max=0.0, ratio_geomean=1.0, k3=0.0, clip_fraction=0.0,
                            tokens=1, learner_tokens=1, unique_tokens=1, optimizer_steps=0, refused="")


class Shared:
    """Spawns members that share `processes` actors."""

    def __init__(self, processes):
        self.handles = [ray.remote(NoopGenerator).options(num_cpus=0, max_concurrency=1000).remote() for _ in range(processes)]

    def __call__(self, name):
        return self.handles[int(name.rsplit("-", 1)[1]) % len(self.handles)]


class Peak(threading.Thread):
    """The largest resident memory of this process while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.bytes = threading.Event(), 0

    def run(self):
        while not self.over.wait(0.05):
            self.bytes = max(self.bytes, psutil.Process().memory_info().rss)


def cpu(process):
    times = process.cpu_times()
    return times.user + times.system


def measure(generators, processes, siblings, repeats):
    tasks = siblings // SIBLINGS
    config = load_config(None, [
        f"generators.min={generators}", "generators.cpus=0", f"generators.max_num_seqs={EACH}", "environment.max_turns=2", "environment.args.hops=1",
        f"algorithm.args.n_siblings={SIBLINGS}", f"sampling.tasks_per_sweep={tasks}",
        f"sampling.concurrency={min(2 * generators, 24)}", "cluster.address=local"])
    spawn = Shared(processes)
    limits = PoolLimits(least=generators, most=generators, each=EACH, start_timeout=300.0)
    pool = ray.remote(GeneratorPool).options(name="rtpo-generator-pool", num_cpus=0, max_concurrency=1000).remote(spawn, limits)
    ray.get(pool.fill.remote(0, generators), timeout=300)
    AsLoaded(pool).publish(0)
    pool_process = psutil.Process(ray.get(pool.__ray_call__.remote(lambda self: os.getpid())))
    algorithm = algorithms.build(config.algorithm)
    coordinator = Coordinator(config=config, algorithm=algorithm, pool=pool, gang=NoopGang(), publisher=AsLoaded(pool))
    coordinator._folder = tempfile.mkdtemp()
    coordinator._ledger = SimpleNamespace(append=lambda *args: None)
    (stage,) = algorithm.stages(1)
    with pytest.raises(StopIteration) as ended:
        next(coordinator._trunks(0, evaluate=False))
    trunks = ended.value.value
    assert trunks.counts.boundaries[0] == tasks
    found = []
    for _ in range(repeats + 1):  # the first warms the workers up
        gc.collect()
        peak, before, started = Peak(), psutil.Process().memory_info().rss, time.perf_counter()
        own, of_pool = cpu(psutil.Process()), cpu(pool_process)
        peak.start()
        event = coordinator._stage(0, 0, stage, trunks)
        peak.over.set()
        peak.join()
        assert event["siblings"] == tasks * SIBLINGS and not event["failed"]
        found.append({"cpu": cpu(psutil.Process()) - own, "pool_cpu": cpu(pool_process) - of_pool, "wall": time.perf_counter() - started,
                      "memory": max(0, peak.bytes - before)})
    workers = [process.memory_info().rss for process in psutil.process_iter() if process.name().startswith("ray::")]
    for handle in (*spawn.handles, pool, *coordinator._gang.ranks):
        ray.kill(handle)
    middle = {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}
    k = tasks * SIBLINGS / 1000
    return {"generators": generators, "processes": processes, "siblings": tasks * SIBLINGS, "blocks": coordinator._blocks(tasks),
            "coordinator_cpu_s_per_1000": middle["cpu"] / k, "pool_cpu_s_per_1000": middle["pool_cpu"] / k, "wall_s_per_1000": middle["wall"] / k,
            "coordinator_cpu_ms_per_block": 1000 * middle["cpu"] / coordinator._blocks(tasks),
            "memory_mb_per_1000": middle["memory"] / k / 2**20, "memory_mb": middle["memory"] / 2**20,
            "coordinator_rss_mb": psutil.Process().memory_info().rss / 2**20,
            "workers": len(workers), "workers_gb": sum(workers) / 2**30}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases to run, 0-based; all by default")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False, logging_level="ERROR",
             _system_config=KEEP_WORKERS)
    quiet_ray_data()
    rows = []
    for number, case in enumerate(CASES):
        if args.cases is None or number in args.cases:
            rows.append(measure(*case, args.repeats if case[2] <= 10_000 else min(args.repeats, 3)))
            print(json.dumps(rows[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "coordinator.json").write_text(json.dumps(rows, indent=1) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
