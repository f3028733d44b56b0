"""Methods side by side through the `rtpo compare` command: real vLLM, Ray Data, learner and broadcast, one sweep each."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # the fixture makes eight runs, one after the other

MINE = '''
from dataclasses import dataclass

from rtpo_ray.algorithms.base import Algorithm, Stage
from rtpo_ray.algorithms.credit import own_turn, returns
from rtpo_ray.options import opt


@dataclass(frozen=True, kw_only=True)
class Best(Algorithm):
    """The best siblings of the first turn are copied, the others left alone."""

    n_siblings: int = opt(4, "siblings a boundary", least=2)
    branching = True

    def stages(self, max_turns):
        return [Stage(turn=0, n_siblings=self.n_siblings, baseline="boundary", with_trunk=False)]

    def credit(self, group):
        best = max(returns(group))
        return own_turn(group, [float(value == best > 0) for value in returns(group)])
'''

# One sweep of each, one with adapters. All objectives beside the clipped surrogate, every kind of branching, and every context that is not
# append.
METHODS = {
    "mine": {"algorithm": {"name": "{folder}/mine.py:Best"}, "learner": {"lora_rank": 4}},
    "stale": {"algorithm": {"name": "rtpo", "args": {"n_siblings": 4, "n_trunks": 2, "merge_groups": True, "reuse_trunk_at_last_turn": True,
                                                     "sync_every": 0, "rho_min": 0.5, "rho_max": 2.0}}},
    "seeupo": {"algorithm": {"name": "seeupo", "args": {"n_trunks": 4}}},
    "ppo": {"algorithm": {"name": "ppo", "args": {"n_trunks": 4, "minibatches": 2, "kl_coef": 0.01}}},
    "treegrpo": {"algorithm": {"name": "treegrpo", "args": {"n_trunks": 2, "n_branches": 2}}, "environment": {"context": "summary"},
                 "generators": {"max_model_len": 256}},
    "refuel": {"algorithm": {"name": "refuel", "args": {"n_trunks": 2, "minibatches": 2}}},
    "recorded": {"algorithm": {"name": "grpo", "args": {"n_trunks": 4}}, "environment": {"context": "window"}},
    "concatenated": {"algorithm": {"name": "grpo", "args": {"n_trunks": 4}}, "environment": {"context": "window", "train_context": "concatenated"}},
}


@pytest.fixture(scope="module")
def compared(tiny_model, tmp_path_factory):
    """(folder of the comparison, output of the first call, output of the second)."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "mine.py").write_text(MINE)
    methods = json.loads(json.dumps(METHODS).replace("{folder}", str(folder)))
    shared = OmegaConf.to_container(OmegaConf.from_dotlist(
        [word for word in tiny_model[0] if not word.startswith(("run.seed", "run.sweeps", "algorithm."))]))
    shared["run"] |= {"root": str(folder), "tokens": 1, "eval_every_tokens": 1000}
    shared["cluster"] = {"dashboard": False, "local_cpus": 3}
    shared["generators"]["min"] = 1  # every run starts its own
    # the model of the shared sections, whatever context a method uses: a warm start is part of the configuration
    shared["model"] = {"path": tiny_model[1]}
    file = folder / "methods.yaml"
    OmegaConf.save(OmegaConf.create({"compare": {"name": "small", "seeds": [3], "methods": methods}, **shared}), file)
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-m", "rtpo_ray", "compare", "--config", str(file)], cwd=ROOT, text=True, timeout=500,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, done.stdout
        outputs.append(done.stdout)
    return folder / "small", *outputs


def stages(compared, label):
    lines = (compared[0] / f"{label}-seed3" / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "stage"]


def test_every_run_trains_and_a_second_call_has_nothing_to_do(compared):
    folder, first, second = compared
    with (folder / "table.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows.keys() == METHODS.keys() and not any(row["error"] for row in rows.values())
    for label in METHODS:
        assert sum(event["optimizer_steps"] for event in stages(compared, label)) >= 1, label
        assert all(event["failed"] == {} and event["refused"] == "" for event in stages(compared, label)), label
        assert float(rows[label]["tokens"]) == sum(
            event["generated_tokens"] for event in map(json.loads, (folder / f"{label}-seed3" / "metrics.jsonl").read_text().splitlines())
            if event["kind"] in ("stage", "sweep"))
    assert first.count("run finished") == len(METHODS) and second.count("is finished already") == len(METHODS)
    assert (folder / "curves.png").stat().st_size > 1000 and (folder / "table.md").read_text() in second


def test_stages_siblings_and_steps_are_the_method_s_own(compared):
    assert [(event["turn"], event["siblings"]) for event in stages(compared, "mine")] == [(0, 32 * 4)]
    assert [event["turn"] for event in stages(compared, "stale")] in ([2, 1, 0], [1, 0])
    assert (stages(compared, "stale")[-1]["groups"], stages(compared, "stale")[-1]["siblings"]) == (32, 32 * 2 * 4)  # two trunks, one boundary
    (seeupo,) = stages(compared, "seeupo")
    assert (seeupo["turn"], seeupo["siblings"], seeupo["generated_tokens"]) == (None, 32 * 4, 0)  # the trunks are the siblings
    assert seeupo["optimizer_steps"] >= 2  # one a turn
    (ppo,) = stages(compared, "ppo")
    assert (ppo["optimizer_steps"], ppo["trained"]) == (2, 32 * 4)  # a critic learns from every rollout
    (tree,) = stages(compared, "treegrpo")
    assert (tree["groups"], tree["siblings"]) == (32, 32 * (2 + 2 * 2))
    (refuel,) = stages(compared, "refuel")
    assert (refuel["groups"], refuel["siblings"]) == (32 * 2, 32 * 2 * 2)


def test_weights_are_pushed_as_often_as_the_method_says(compared):
    """The stale run keeps the trunk's version to the end of the sweep, so later turns are scored by weights that have moved."""
    assert {event["weight_version"] for event in stages(compared, "stale")} == {0}
    assert abs(stages(compared, "stale")[-1]["ratio_geomean"] - 1) > 1e-4


def test_concatenated_contexts_drift_and_recorded_ones_do_not(compared):
    (recorded,), (concatenated,) = stages(compared, "recorded"), stages(compared, "concatenated")
    assert abs(recorded["ratio_geomean"] - 1) < 1e-4 and recorded["logprob_gap_max"] < 1e-3
    assert concatenated["k3"] > 100 * abs(recorded["k3"]) and concatenated["logprob_gap_max"] > 0.01
