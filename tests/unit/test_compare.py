"""Comparisons: every figure by hand, and a comparison that is stopped goes on where it stopped. The runs here only write files."""

import csv
import json
import math

import numpy as np
import pytest
from filelock import FileLock, Timeout
from PIL import Image

from rtpo_ray.compare import Entry, load_comparison, run_comparison, unfinished
from rtpo_ray.config import hash_config, load_config, to_yaml
from rtpo_ray.errors import ConfigError, EngineError
from rtpo_ray.reports.comparison import RunResult, area, interval, markdown, mean_curve, run_result, tokens_to, write_comparison

FILE = """
compare:
  name: pair
  seeds: [0, 1]
  methods:
    first: {learner: {lr: 1e-4}}
    second: {learner: {lr: 2e-4}, sampling: {tasks_per_sweep: 32}}
run: {root: ROOT, tokens: 1000, aim: false}
cluster: {address: elsewhere}
"""


def write(folder, text=FILE):
    (folder / "pair.yaml").write_text(text.replace("ROOT", str(folder / "runs")))
    return folder / "pair.yaml"


def load(folder, *overrides, text=FILE):
    return load_comparison(write(folder, text), overrides)


def refused(folder, *overrides, text=FILE):
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides, text=text)
    return str(caught.value)


def test_every_run_gets_the_shared_sections_its_method_and_its_seed(tmp_path):
    comparison = load(tmp_path)
    assert (comparison.name, comparison.seeds, comparison.budget, comparison.optimum) == ("pair", (0, 1), 1000, None)
    assert comparison.folder == tmp_path / "runs" / "pair"
    assert [(entry.label, entry.seed) for entry in comparison.runs] == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    last = comparison.runs[-1]
    assert last.folder == tmp_path / "runs" / "pair" / "second-seed1"
    assert last.config == load_config(None, [
        "run.name=second-seed1", f"run.root={tmp_path}/runs/pair", "run.seed=1", "run.experiment=pair", "run.tokens=1000", "run.aim=false",
        "cluster.address=elsewhere", "learner.lr=2e-4", "sampling.tasks_per_sweep=32"])
    assert comparison.runs[0].config.learner is not comparison.runs[2].config.learner  # a run that changes its own changes no other


def test_overrides_win_over_shared_sections_and_methods(tmp_path):
    comparison = load(tmp_path, "compare.seeds=[7]", "compare.optimum=0.9", "compare.methods.second.learner.eps=1e-5", "run.tokens=50",
                      "learner.lr=3e-4")
    assert [(entry.label, entry.seed) for entry in comparison.runs] == [("first", 7), ("second", 7)]
    assert (comparison.budget, comparison.optimum, [entry.config.learner.lr for entry in comparison.runs]) == (50, 0.9, [3e-4, 3e-4])
    assert [entry.config.learner.eps for entry in comparison.runs] == [1e-8, 1e-5]


@pytest.mark.parametrize(("override", "parts"), [
    ("compare=3", ["compare is a section", "(3)", "name, seeds, methods, optimum"]),
    ("compare.seed=[1]", ["override 'compare.seed=[1]'", "unknown field compare.seed ", "did you mean compare.seeds?"]),
    ("compare.zzz=1", ["unknown field compare.zzz;", "valid here: name, seeds, methods, optimum"]),
    ("compare.seeds=[]", ["compare.seeds is []", "at least one int"]),
    ("compare.seeds=3", ["compare.seeds is 3", "list"]),
    ("compare.seeds=[0,true]", ["compare.seeds is [0, True]"]),
    ("compare.seeds=[-1]", ["compare.seeds is [-1]"]),
    ("compare.seeds=[1,2,1]", ["compare.seeds is [1, 2, 1]", "every seed once"]),
    ("compare.seeds.a=1", ["override 'compare.seeds.a=1'", "the section compare"]),
    ("compare.methods={}", []),  # merged into the file's: nothing changes
    ("compare.methods=null", ["compare.methods is None", "at least one label"]),
    ("compare.methods.first=3", ["compare.methods.first is 3", "sections"]),
    ("compare.methods.a/b={}", ["'a/b'", "plain folder name"]),
    ("compare.methods.-a={}", ["'-a'", "plain folder name"]),
    ("compare.name=a/b", ["compare.name is 'a/b'", "plain folder name"]),
    ("compare.name=null", ["compare.name is None"]),
    ("compare.optimum=1.5", ["compare.optimum is 1.5", "[0, 1]"]),
    ("compare.methods.second.learner.lrr=1", ["compare.methods.second: ", "pair.yaml", "unknown field learner.lrr ", "learner.lr?"]),
    ("compare.methods.second.learner.lr=0", ["compare.methods.second: field learner.lr is 0.0", "more than 0"]),
    ("compare.methods.second.run.tokens=5", ["compare.methods.second: field run.tokens is 5; expected 1000 as for first", "equal budget"]),
    ("compare.methods.second.run.eval_tasks=5", ["compare.methods.second: field run.eval_tasks is 5; expected 256 as for first", "the same tasks"]),
    ("compare.methods.second.environment.args={hops: 1}", ["environment.args is {'hops': 1}; expected {} as for first"]),
    ("compare.methods.second.cluster.local_cpus=64", ["cluster", "as for first, since the runs share one cluster"]),
    ("run.tokens=0", ["compare.methods.first: field run.tokens is 0", "at least 1"]),
    ("run.eval_tasks=0", ["run.eval_tasks is 0"]),
    ("run.seed=3", ["override 'run.seed=3'", "run.seed is 3", "compare.seeds"]),
    ("run.name=x", ["run.name is 'x'", "a comparison sets it"]),
    ("compare.methods.second.run.root=x", ["compare.methods.second.run.root is 'x'", "one run.root"]),
])
def test_mistakes_are_named_before_anything_starts(tmp_path, override, parts):
    if not parts:
        load(tmp_path, override)
        return
    message = refused(tmp_path, override)
    assert [part for part in parts if part not in message] == [], message
    assert not (tmp_path / "runs").exists()


def test_a_file_without_the_section_is_refused(tmp_path):
    assert "compare.name is None" in refused(tmp_path, text="run: {tokens: 5}\n")
    assert "compare.methods is None" in refused(tmp_path, text="compare: {name: a, seeds: [0]}\n")
    assert "compare.seeds is None" in refused(tmp_path, text="compare: {name: a, methods: {b: {}}}\n")


def evaluation(tokens, success):
    return {"kind": "eval", "sweep": 0, "tokens": tokens, "success": success, "success_greedy": 1.0}


def stage(groups, zero, ratio, k3, tokens=100):
    return {"kind": "stage", "sweep": 0, "groups": groups, "zero_advantage_rate": zero, "ratio_geomean": ratio, "k3": k3, "generated_tokens": tokens}


def sweep(tokens, seconds):
    return {"kind": "sweep", "sweep": 0, "generated_tokens": tokens, "seconds": {"total": seconds}}


EVENTS = [evaluation(0, 0.2), stage(10, 0.5, 1.0, 0.25), stage(0, None, None, None), sweep(300, 2.5), evaluation(400, 0.6),
          stage(30, 0.1, 0.75, 0.5, tokens=400), sweep(400, 3.0), evaluation(1200, 1.0)]


def test_the_figures_of_a_run():
    run = run_result("rtpo", 3, EVENTS, 800)
    assert run == RunResult(method="rtpo", seed=3, curve=((0, 0.2), (400, 0.6), (1200, 1.0)), final_success=run.final_success,
                            area=run.area, tokens_to_80=run.tokens_to_80, tokens=1300, seconds=5.5, zero_advantage_rate=0.2, ratio_drift=0.25,
                            k3=0.375)
    assert run.final_success == pytest.approx(0.8)  # between the evaluations after 400 and 1200 tokens
    assert run.area == pytest.approx((400 * 0.4 + 400 * 0.7) / 800)  # at 800 tokens the curve stands at 0.8
    assert run.tokens_to_80 == pytest.approx(800)


def test_a_run_that_trained_nothing_has_no_figures_of_training():
    run = run_result("rtpo", 0, [evaluation(0, 0.5), stage(0, None, None, None), sweep(10, 1.0), evaluation(100, None)], 200)
    assert (run.zero_advantage_rate, run.ratio_drift, run.k3, run.tokens_to_80) == (None, None, None, None)
    assert (run.final_success, run.area) == (0.5, 0.5)
    assert run_result("rtpo", 0, [], 200) == RunResult(method="rtpo", seed=0, tokens=0, seconds=0)


@pytest.mark.parametrize(("curve", "expected"), [
    ([(0, 0.5)], 0.5),
    ([(0, 0.0), (50, 1.0)], 0.25 + 0.5),  # the last value holds
    ([(0, 0.0), (200, 1.0)], 0.25),  # cut at the budget
    ([(0, 0.0), (50, 1.0), (100, 0.0), (150, 1.0)], 0.5),
    ([], None),
])
def test_area_over_a_budget_of_100(curve, expected):
    assert area(curve, 100) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("curve", "expected"), [
    ([(0, 0.8), (10, 0.9)], 0),
    ([(0, 0.0), (10, 0.8)], 10),
    ([(0, 0.6), (10, 1.0), (20, 0.0)], 5),
    ([(0, 0.9), (10, 0.1), (20, 0.9)], 0),  # the first crossing
    ([(0, 0.0), (10, 0.79)], None),
    ([(0, 0.0), (200, 1.0)], None),  # beyond the budget
    ([(0, 0.0), (110, 0.88)], 100),
    ([], None),
])
def test_tokens_to_80_percent_within_a_budget_of_100(curve, expected):
    assert tokens_to(curve, 100) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("values", "mean", "half"), [
    ([0.5], 0.5, None),
    ([1.0, 3.0], 2.0, 12.7062047362),  # stdev sqrt(2), over sqrt(2)
    ([1.0, 2.0, 3.0], 2.0, 4.3026527297 / math.sqrt(3)),
    ([2.0, 2.0, 2.0], 2.0, 0.0),
    ([0.0] * 60 + [2.0] * 61, 122 / 121, 1.9799304051 * math.sqrt(60 * 61 / 121**2 * 4 * 121 / 120) / 11),
])
def test_means_and_t_intervals(values, mean, half):
    assert interval(values) == (pytest.approx(mean), half if half is None else pytest.approx(half))


def test_the_mean_curve_is_taken_at_every_point_of_every_seed():
    grid, mean, least, most = mean_curve([[(0, 0.0), (100, 1.0)], [(0, 0.5), (40, 0.5), (300, 1.0)]], 200)
    assert grid.tolist() == [0, 40, 100, 200]
    late = [0.5, 0.5, 0.5 + 0.5 * 60 / 260, 0.5 + 0.5 * 160 / 260]
    np.testing.assert_allclose(least, [0.0, 0.4, late[2], late[3]])
    np.testing.assert_allclose(most, [0.5, 0.5, 1.0, 1.0])
    np.testing.assert_allclose(mean, [0.25, 0.45, (1 + late[2]) / 2, (1 + late[3]) / 2])


RESULTS = [
    RunResult(method="rtpo", seed=0, curve=((0, 0.25), (1000, 0.75)), final_success=0.75, area=0.5, tokens_to_80=None, tokens=1100, seconds=1200.25,
              zero_advantage_rate=0.5, ratio_drift=2e-7, k3=1e-9, lost=7),
    RunResult(method="grpo", seed=0, error="EngineError: lost, or \"so\""),
    RunResult(method="rtpo", seed=1, curve=((0, 0.25), (900, 1.0)), final_success=1.0, area=0.5, tokens_to_80=660.0, tokens=900, seconds=1000.25,
              zero_advantage_rate=0.25, ratio_drift=4e-7, k3=None),
]


def test_tables_to_the_letter_and_the_picture(tmp_path):
    write_comparison(tmp_path, RESULTS, 1000, optimum=0.9)
    assert (tmp_path / "table.csv").read_text() == (
        "method,seed,final_success,area,tokens_to_80,tokens,seconds,zero_advantage_rate,ratio_drift,k3,lost,error\n"
        "rtpo,0,0.75,0.5,,1100,1200.25,0.5,2e-07,1e-09,7,\n"
        "grpo,0,,,,,,,,,0,\"EngineError: lost, or \"\"so\"\"\"\n"
        "rtpo,1,1.0,0.5,660.0,900,1000.25,0.25,4e-07,,0,\n")
    assert (tmp_path / "table.md").read_text() == (
        "| method | seeds | final success | area | tokens to 80 % | seconds | equal | drift | k3 |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        "| rtpo | 2 | 87.5 ± 158.8 % | 50.0 ± 0.0 % | 1 of 2, median 660 | 1,100 ± 1,271 | 37.5 ± 158.8 % | 3.0e-07 ± 1.3e-06 | 1.0e-09 |\n"
        "| grpo | 0 | - | - | 0 of 0 | - | - | - | - |\n"
        "\n"
        "Budget: 1,000 generated tokens a run. Mean over the seeds, ± half the width of its 95 % t-interval. `final success`: at the budget, "
        "linear between evaluations; `area`: mean success over the budget; "
        "`seconds`: of training; `equal`: share of groups whose returns are all equal; `drift`: largest distance of a stage's `ratio_geomean` "
        "from 1; `k3`: mean over the stages.\n"
        "\n"
        "Ended before the budget: rtpo seed 1 (900).\n"
        "\n"
        "Rollouts lost to errors, which evaluations count as no success: rtpo seed 0 (7).\n"
        "\n"
        "Failed, and in no figure above:\n"
        "\n"
        "- grpo seed 0: EngineError: lost, or \"so\"\n")
    with Image.open(tmp_path / "curves.png") as image:
        image.load()
        assert image.width > 500 and image.height > 300 and len(image.convert("RGB").getcolors(2**24)) > 100


def test_one_seed_shows_no_interval_and_a_table_of_nothing_can_be_written(tmp_path):
    assert "| rtpo | 1 | 75.0 % | 50.0 % | 0 of 1 | 1,200 | 50.0 % | 2.0e-07 | 1.0e-09 |\n" in markdown(RESULTS[:1], 1000)
    write_comparison(tmp_path, [], 1000)
    assert (tmp_path / "curves.png").stat().st_size > 0 and len((tmp_path / "table.csv").read_text().splitlines()) == 1


class Trainer:
    """Writes what a run leaves. `wrong`: run name -> the exception of its next call, after it wrote something."""

    def __init__(self, **wrong):
        self.made, self.wrong = [], {name.replace("_", "-"): error for name, error in wrong.items()}

    def __call__(self, config):
        folder = Entry(label="", seed=0, config=config).folder
        assert not folder.exists()
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(config))
        (folder / "metrics.jsonl").write_text(json.dumps(evaluation(0, 0.5)) + "\n")
        self.made.append(config.run.name)
        if config.run.name in self.wrong:
            raise self.wrong.pop(config.run.name)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))


NAMES = ["first-seed0", "second-seed0", "first-seed1", "second-seed1"]


def rows(folder):
    with (folder / "table.csv").open() as file:
        return [(f"{row['method']}-seed{row['seed']}", row["error"]) for row in csv.DictReader(file)]


def test_all_runs_are_made_once_seeds_outside(tmp_path):
    train, lines = Trainer(), []
    folder = run_comparison(load(tmp_path), train, lines.append)
    assert train.made == NAMES and folder == tmp_path / "runs" / "pair"
    assert lines == [f"run {number}/4: {name}" for number, name in enumerate(NAMES, 1)]
    assert rows(folder) == [(name, "") for name in NAMES]
    status = json.loads((folder / "first-seed0" / "status.json").read_text())
    assert status == {"status": "finished", "config_hash": hash_config(load(tmp_path).runs[0].config), "error": ""}
    assert sorted(path.name for path in (folder / "first-seed0").iterdir()) == ["config.yaml", "metrics.jsonl", "status.json"]

    (folder / "table.md").unlink()
    assert unfinished(load(tmp_path)) == []
    run_comparison(load(tmp_path), train, lines.append)
    assert train.made == NAMES and lines[-1] == "run 4/4: second-seed1 is finished already"
    assert (folder / "table.md").exists()


def test_a_further_seed_and_a_further_method_are_added_to_what_is_there(tmp_path):
    train = Trainer()
    run_comparison(load(tmp_path, "compare.seeds=[1]"), train, print)
    run_comparison(load(tmp_path, "compare.methods.third.learner.lr=3e-4"), train, print)
    assert train.made == ["first-seed1", "second-seed1", "first-seed0", "second-seed0", "third-seed0", "third-seed1"]


def test_a_run_by_a_method_whose_file_was_edited_is_not_taken_for_finished(tmp_path):
    method = "from dataclasses import dataclass\nfrom rtpo_ray.algorithms.grpo import Grpo\n@dataclass(frozen=True, kw_only=True)\nclass My(Grpo):\n"
    (tmp_path / "my.py").write_text(method + "    number = 1\n")
    override = f"compare.methods.second.algorithm.name={tmp_path}/my.py:My"
    run_comparison(load(tmp_path, override), Trainer(), print)
    assert unfinished(load(tmp_path, override)) == []
    (tmp_path / "my.py").write_text(method + "    number = 2\n")
    with pytest.raises(ConfigError, match="holds a finished run of another configuration"):
        unfinished(load(tmp_path, override))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": "finis'])
def test_a_damaged_status_is_that_of_an_unfinished_run(tmp_path, text):
    folder = run_comparison(load(tmp_path), Trainer(), print)
    (folder / NAMES[1] / "status.json").write_text(text)
    assert [entry.config.run.name for entry in unfinished(load(tmp_path))] == [NAMES[1]]


def test_metrics_that_cannot_be_read_name_their_run(tmp_path):
    folder = run_comparison(load(tmp_path), Trainer(), print)
    (folder / NAMES[1] / "metrics.jsonl").write_text('{"kind": "ev')
    with pytest.raises(ConfigError, match=rf"the metrics of the finished run .*{NAMES[1]} cannot be read .*; remove that folder"):
        run_comparison(load(tmp_path), Trainer(), print)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, type("Terminated", (BaseException,), {})])
def test_an_interrupt_is_raised_and_the_next_call_goes_on_with_that_run(tmp_path, stop):
    train, lines = Trainer(second_seed0=stop()), []
    with pytest.raises(stop):
        run_comparison(load(tmp_path), train, print)
    folder = tmp_path / "runs" / "pair"
    assert train.made == NAMES[:2] and rows(folder) == [(NAMES[0], "")]
    assert [entry.config.run.name for entry in unfinished(load(tmp_path))] == NAMES[1:]
    run_comparison(load(tmp_path), train, lines.append)
    assert train.made == [*NAMES[:2], *NAMES[1:]] and rows(folder) == [(name, "") for name in NAMES]
    aside = folder / "unfinished" / "second-seed0-1"
    assert lines[:2] == ["run 1/4: first-seed0 is finished already",
                         f"run 2/4: second-seed0 was not finished and is made again; what there was is now {aside}"]
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_failed_run_is_recorded_and_made_again_at_the_next_call(tmp_path):
    train, lines = Trainer(first_seed0=EngineError("lost\nand a second line"), first_seed1=EngineError(), second_seed0=KeyError("theirs")), []
    folder = run_comparison(load(tmp_path), train, lines.append)
    assert train.made == NAMES and "run 1/4: first-seed0 failed: EngineError: lost" in lines
    assert any("second-seed0 failed:\nTraceback" in line for line in lines)  # not one of ours: where it came from is said
    assert rows(folder) == [("first-seed0", "EngineError: lost"), ("second-seed0", "KeyError: 'theirs'"), ("first-seed1", "EngineError"),
                            ("second-seed1", "")]
    assert "- first seed 0: EngineError: lost\n" in (folder / "table.md").read_text()
    run_comparison(load(tmp_path), train, lines.append)
    assert train.made == [*NAMES, "first-seed0", "second-seed0", "first-seed1"] and rows(folder) == [(name, "") for name in NAMES]


def test_a_run_that_fails_before_its_folder_exists_is_recorded_too(tmp_path):
    def train(config):
        raise ConfigError("no room")

    folder = run_comparison(load(tmp_path), train, print)
    assert rows(folder) == [(name, "ConfigError: no room") for name in NAMES]


def test_a_finished_run_of_another_configuration_is_refused_before_anything_starts(tmp_path):
    train = Trainer(second_seed0=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_comparison(load(tmp_path), train, print)
    with pytest.raises(ConfigError) as caught:
        run_comparison(load(tmp_path, "learner.lr=3e-4", "environment.args.hops=1"), train, print)
    folder = tmp_path / "runs" / "pair" / "first-seed0"
    assert str(caught.value) == (
        f"field compare.name is 'pair': {folder} holds a finished run of another configuration (environment.args.hops was absent, now 1, "
        "learner.lr was 0.0001, now 0.0003); choose another compare.name or remove that folder")
    assert train.made == NAMES[:2]
    run_comparison(load(tmp_path, "compare.methods.second.learner.lr=3e-4"), train, print)  # that one was not finished
    assert train.made == [*NAMES[:2], *NAMES[1:]]


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    folder = tmp_path / "runs" / "pair"
    folder.mkdir(parents=True)
    with FileLock(folder / ".compare.lock"), pytest.raises(ConfigError, match=r"compare\.name is 'pair': another process works in"):
        run_comparison(load(tmp_path), Trainer(), print)
    run_comparison(load(tmp_path), Trainer(first_seed0=Timeout("other")), print)  # a run's own lock is not taken for the comparison's
    assert rows(folder)[0] == ("first-seed0", "Timeout: The file lock 'other' could not be acquired.")


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="a folder for the comparison cannot be made there"):
        run_comparison(load(tmp_path), Trainer(), print)
