"""How well `rtpo simulate` predicts sweeps that it has not seen, from what it fits to one run.

    python tests/bench/simulation.py                # about eight minutes on two cores; writes results/simulation.json
    python tests/bench/simulation.py --keep runs/validation --only rtpo-1x1 grpo-1x1     # a part of it; what is kept is not made again

Real runs of the quickstart's model and task, by RTPO and GRPO, with 1, 2 and 3 generators and one learner rank, and with 2 and 2. The learning
rate is so small that the policy, and so the work of a sweep, stays what it was. The parameters are fitted to one run of RTPO; every other run
is predicted from them: another number of processes, another method, or both. Processes share the machine's cores, in the model as well, and how
much busy cores slow each other down is measured beforehand. The first sweep warms the processes up and counts nowhere; the median of the others
is compared, or with --of min the fastest of them, for machines that are not left alone: what disturbs a sweep only adds to it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/bench")]
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), "RAY_DATA_LOG_LEVEL": "ERROR",
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ.pop("RAY_ADDRESS", None)

import numpy as np  # noqa: E402 - the variables above are read when numpy, Ray and torch are imported
from record import target, write  # noqa: E402

from actors import cluster  # noqa: E402
from rtpo_ray import algorithms  # noqa: E402
from rtpo_ray.config import Config, load_config  # noqa: E402
from rtpo_ray.policy.tiny import materialise  # noqa: E402
from rtpo_ray.reports.tracker import Tracker  # noqa: E402
from rtpo_ray.simulation.fit import fit, measured_sweeps, overlaps  # noqa: E402
from rtpo_ray.simulation.sweep import Shape, simulate  # noqa: E402

SHAPES = ((1, 1), (2, 1), (3, 1), (2, 2))  # generators, learner ranks
METHODS = {"rtpo": ("algorithm.name=rtpo", "algorithm.args.n_siblings=8"), "grpo": ("algorithm.name=grpo", "algorithm.args.n_trunks=14")}
WITHIN = 0.15


def configure(root: Path, method: str, generators: int, ranks: int, sweeps: int) -> Config:
    """State of the learner is never saved, so the trunks of all sweeps are kept: the lengths of what was sampled."""
    return load_config(ROOT / "conf/quickstart.yaml", [
        *METHODS[method], f"run.name={method}-{generators}x{ranks}", f"run.root={root}", f"run.sweeps={sweeps}", "run.eval_tasks=0", "run.aim=false",
        "run.state_every=100000", "run.checkpoint_every=0", "learner.lr=1e-9", f"generators.min={generators}", f"learner.ranks={ranks}",
        "learner.threads=1", "cluster.dashboard=false", "cluster.local_cpus=8", "learner.timeout=120", "sampling.stage_timeout=120"])


def finished(config: Config) -> bool:
    return (Path(config.run.root) / config.run.name / "final").is_dir()


def measure(configs: list[Config]) -> None:
    model = str(materialise(configs[0], print))
    with cluster.connect(*configs):
        for config in configs:
            folder, started = Path(config.run.root) / config.run.name, time.perf_counter()
            tracker = Tracker(config, folder, lambda line: None)
            for event in cluster.run_events(config, model, str(folder)):
                tracker.record(event)
            tracker.close("finished")
            seconds = [round(sweep["total"], 2) for sweep in measured_sweeps(folder)]
            print(f"{config.run.name}: sweeps {seconds} s, all of it {time.perf_counter() - started:.0f} s", flush=True)


def toil(seconds: float) -> int:
    """How often a piece of work, Python and small products of matrices like those of the tiny model, is done in so many seconds."""
    left, right, done, until = np.ones((256, 128), np.float32), np.ones((128, 384), np.float32), 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        left @ right
        done += len({str(number): number for number in range(400)}) > 0
    return done


def crowding() -> float:
    """How much slower each process is when every core has one than when it is alone: the median of five comparisons."""
    cores = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(toil, [0.5] * cores, chunksize=1)
        ratios = [pool.apply(toil, (0.5,)) / (sum(pool.map(toil, [0.5] * cores, chunksize=1)) / cores) for _ in range(5)]
    return max(1.0, statistics.median(ratios))


OF = {"median": statistics.median, "min": min}


def pairs(folders: list[Path], fitted_on: str, of: Callable[[Iterable[float]], float], crowded: float) -> list[dict[str, Any]]:
    """Measured and predicted sweep of every run, from the parameters of one of them."""
    found = fit(next(folder for folder in folders if folder.name == fitted_on), of, crowded)
    made = []
    for folder in folders:
        config = load_config(folder / "config.yaml", ["cluster.address=elsewhere"])
        method = algorithms.build(config.algorithm)
        shape = Shape(generators=config.generators.min, ranks=config.learner.ranks, overlap=overlaps(config, method))
        sweep = simulate(method, found.work, found.machine, shape)
        sweeps = measured_sweeps(folder)
        measured = {phase: of(each[phase] for each in sweeps) for phase in ("total", "generate", "learn", "broadcast", "other")}
        predicted = {"total": sweep.seconds, "generate": sweep.sum("generate"), "learn": sweep.sum("learn"), "broadcast": sweep.sum("push"),
                     "other": sweep.sum("other") + sweep.outside}
        made.append({"run": folder.name, "fitted": folder.name == fitted_on, "measured": measured, "predicted": predicted,
                     "sweeps": [each["total"] for each in sweeps], "error": predicted["total"] / measured["total"] - 1})
        print(f"{folder.name:10} measured {measured['total']:6.2f} s, predicted {predicted['total']:6.2f} s, {made[-1]['error']:+.1%}"
              + "  (fitted)" * made[-1]["fitted"] + "   " + "  ".join(f"{name} {measured[name]:.2f} / {predicted[name]:.2f}"
                                                                     for name in ("generate", "learn", "broadcast", "other")), flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=4, help="of every run, the first not counted (4)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--fitted", default="rtpo-1x1", help="run that the parameters are fitted to (rtpo-1x1)")
    parser.add_argument("--of", choices=OF, default="median", help="of several sweeps (median)")
    parser.add_argument("--crowding", type=float, help="instead of measuring it; see rtpo_ray/simulation/model.py")
    parser.add_argument("--only", nargs="+", metavar="METHOD-GxR", help="of the runs, such as rtpo-2x1, those that are not there yet; default: all")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs there, and make those that are not there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(args.keep or temporary).resolve()
        crowded = args.crowding or crowding()
        print(f"crowding {crowded:.2f}", flush=True)
        configs = [configure(root, method, *shape, args.sweeps) for shape in SHAPES for method in args.methods]
        if waiting := [one for one in configs if not finished(one) and (not args.only or one.run.name in args.only)]:
            measure(waiting)
        made = pairs([root / one.run.name for one in configs if finished(one)], args.fitted, OF[args.of], crowded)
    worst = max(abs(each["error"]) for each in made if not each["fitted"])
    print(f"worst {worst:.1%}")
    write("simulation", "sweeps of real runs, predicted from another run", {"fitted": args.fitted, "of": args.of, "crowding": crowded, "pairs": made},
          [target(f"{each['run']} predicted within {WITHIN:.0%}", abs(each["error"]), WITHIN) for each in made if not each["fitted"]])


if __name__ == "__main__":
    main()
