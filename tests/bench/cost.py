"""What RTPO costs beside GRPO: seconds at equal generated tokens and at equal trained tokens, and where they go.

    python tests/bench/cost.py                      # some five minutes on two cores; writes results/cost.json
    python tests/bench/cost.py --pairs 3 --sweeps 1

Both as conf/compare/lookup.yaml has them (two hops, three turns; the same model, tasks, generators and learner), on one Ray cluster, in turns: a
few sweeps of one while the other is idle. A small learning rate keeps the model, and so the amounts, as they are. RTPO's sweep has a stage a turn,
each with an update and a push that the next one waits for; GRPO's has one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # of this process, which builds the model; the sides get their own

from sides import PHASES, QUIET, our_sweeps, summary, take_turns, write  # noqa: E402

from rtpo_ray.compare import load_comparison  # noqa: E402
from rtpo_ray.config import to_yaml  # noqa: E402

TARGET = 1.10
METHODS = ("rtpo", "grpo")


def measure(pairs: int, sweeps: int, given: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Answers by method."""
    import ray

    from actors.cluster import KEEP_WORKERS
    from rtpo_ray.policy.tiny import materialise

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _system_config=KEEP_WORKERS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the sides too; Ray has put a handler of its own in place
    address = ray.get_runtime_context().gcs_address
    runs = {entry.label: entry.config for entry in load_comparison(ROOT / "conf/compare/lookup.yaml", ["cluster.address=elsewhere", *given])
            .runs if entry.seed == 0}
    with tempfile.TemporaryDirectory(prefix="cost-") as name:
        scratch, sides = Path(name), []
        for method in METHODS:
            file = scratch / f"{method}.yaml"
            file.write_text(to_yaml(runs[method]))
            sides.append(our_sweeps(materialise(runs[method]), scratch, [str(file), f"cluster.address={address}", "learner.lr=1e-6"], method))
        return dict(zip(METHODS, take_turns(sides, sweeps, pairs), strict=True))


def extra(rtpo: dict[str, Any], grpo: dict[str, Any], of: str) -> dict[str, float]:
    """Milliseconds that RTPO needs beyond GRPO for 1000 tokens, by phase."""
    return {phase: 1e6 * (rtpo["phases"][phase] / rtpo[of] - grpo["phases"][phase] / grpo[of]) for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="turns of either method that count")
    parser.add_argument("--sweeps", type=int, default=2, help="of one turn")
    parser.add_argument("--out", default="cost", help="name of the file of results")
    parser.add_argument("overrides", nargs="*", help="section.field=value, for both")
    args = parser.parse_args()
    os.environ |= QUIET
    os.chdir(ROOT)
    answers = measure(args.pairs, args.sweeps, args.overrides)
    figures: dict[str, Any] = {method: summary(found) for method, found in answers.items()}
    targets = []
    for kind in ("generated_tokens", "trained_tokens"):
        def seconds(answer: dict[str, Any], kind: str = kind) -> float:
            return answer["seconds"] * len(answer["steps"]) / sum(step[kind] for step in answer["steps"])
        ratios = [seconds(rtpo) / seconds(grpo) for rtpo, grpo in zip(*answers.values(), strict=True)]
        figures[f"times_seconds_at_equal_{kind}"] = statistics.median(ratios)
        figures[f"each_at_equal_{kind}"] = [round(ratio, 3) for ratio in ratios]
        figures[f"extra_ms_per_1000_{kind}"] = extra(figures["rtpo"], figures["grpo"], f"{kind}_a_step")
        if kind == "generated_tokens":
            targets.append({"target": f"at most {TARGET:g} x GRPO's seconds at equal generated tokens", "measured": statistics.median(ratios),
                            "met": statistics.median(ratios) <= TARGET})
    write(args.out, __doc__, figures, targets)
    for method in METHODS:
        of = figures[method]
        print(f"{method}: {of['seconds_a_step']:.2f} s a sweep, {of['generated_tokens_a_step']:.0f} tokens generated, "
              f"{of['trained_tokens_a_step']:.0f} trained in {of['learner_tokens_a_step']:.0f} positions; "
              + ", ".join(f"{phase} {of['phases'][phase]:.2f}" for phase in PHASES))
    for key in figures:
        if key.startswith(("times", "each", "extra")):
            print(key, figures[key])


if __name__ == "__main__":
    main()
