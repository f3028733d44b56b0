"""Events of a run: one line of JSON and one short line in the terminal each. Aim stays off here."""

import json
import sys

import pytest

from rtpo_ray.config import Config, RunConfig, load_config
from rtpo_ray.ledger import Ledger, Progress
from rtpo_ray.reports.tracker import Tracker, _lost, _to_aim, eval_line


def tracked(folder):
    """(tracker of a run of 4 sweeps, the lines that it says, its configuration)."""
    config = load_config(None, ["run.aim=false", "run.sweeps=4", "cluster.address=elsewhere"])
    lines = []
    return Tracker(config, folder, lines.append), lines, config


STAGE = {"kind": "stage", "sweep": 0, "turn": 2, "groups": 60, "siblings": 480, "success": 0.125, "zero_advantage_rate": 0.5,
         "logprob_gap_max": 3e-6, "grad_norm": 0.1234,
         "generated_tokens": 1200, "filtered": {"zero_advantage": 8}, "failed": {}, "retired": {}, "refused": "", "seconds": {"total": 3.26}}
SWEEP = {"kind": "sweep", "sweep": 0, "trunk_success": 0.5, "trunk_turns_mean": 2.345, "trunk_ends": {"terminated": 9}, "weight_version": 3,
         "generated_tokens": 34,
         "failed": {}, "retired": {}, "seconds": {"total": 12.0}}
EVAL = {"kind": "eval", "sweep": 0, "tasks": 256, "success": 0.3125, "success_greedy": 0.5, "tool_calls_mean": 1.96, "malformed_calls": 4,
        "ends": {"terminated": 256},
        "failed": {}, "retired": {}}


def test_every_event_is_one_line_of_json_at_once(tmp_path):
    tracker, lines, _ = tracked(tmp_path / "run")
    events = [EVAL, STAGE, SWEEP]
    for number, event in enumerate(events):
        tracker.record(event)
        kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]  # before close: a killed run keeps it
        assert [{key: value for key, value in one.items() if key != "time"} for one in kept] == events[: number + 1]
        assert kept[-1]["time"] > 1.6e9
    assert len(lines) == 3 and all("\n" not in line for line in lines)
    assert "time" not in STAGE
    tracker.close("finished")


def test_the_configuration_lies_beside_the_metrics(tmp_path):
    _, _, config = tracked(tmp_path / "a" / "run")
    assert load_config(tmp_path / "a" / "run" / "config.yaml") == config


def test_a_run_that_exists_is_refused_and_left_alone(tmp_path):
    tracked(tmp_path / "run")[0].record(STAGE)
    (tmp_path / "run" / "config.yaml").write_text("kept")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(FileExistsError, match=r"holds a run already; choose another run\.name"):
        tracked(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before and (tmp_path / "run" / "config.yaml").read_text() == "kept"


@pytest.mark.parametrize(("changes", "line"), [
    ({}, "  turn 2  60 groups  480 siblings  success 12.5 %  equal 50.0 %  gap 3e-06  grad 0.12  3.3 s"),
    ({"failed": {"EngineError: lost": 8, "KeyError: 'x'": 4}, "failed_first": {"EngineError: lost": "train-3/0/2/1", "KeyError: 'x'": "y"}},
     "  turn 2  60 groups  480 siblings  success 12.5 %  equal 50.0 %  gap 3e-06  grad 0.12  3.3 s\n"
     "    FAILED 12, first train-3/0/2/1: EngineError: lost"),
    ({"success": None, "zero_advantage_rate": None, "logprob_gap_max": None,
      "groups": 0, "siblings": 0, "grad_norm": 0.0},
     "  turn 2  0 groups  0 siblings  success -  equal -  gap -  grad 0.00  3.3 s"),
    ({"turn": None}, "  all turns  60 groups  480 siblings  success 12.5 %  equal 50.0 %  gap 3e-06  grad 0.12  3.3 s"),
    ({"refused": "gradient norm", "grad_norm": None, "loss": None},
     "  turn 2  60 groups  480 siblings  success 12.5 %  equal 50.0 %  gap 3e-06  grad -  3.3 s  REFUSED: gradient norm"),
    ({"retired": {"rtpo-generator-1": "ActorDiedError: gone"}},
     "  turn 2  60 groups  480 siblings  success 12.5 %  equal 50.0 %  gap 3e-06  grad 0.12  3.3 s\n"
     "    RETIRED rtpo-generator-1: ActorDiedError: gone"),
])
def test_stage_lines(tmp_path, changes, line):
    tracker, lines, _ = tracked(tmp_path)
    tracker.record({**STAGE, **changes})
    assert lines == [line]


def test_sweep_lines_count_all_tokens_and_say_how_long_is_left(tmp_path, monkeypatch):
    tracker, lines, _ = tracked(tmp_path)
    started = tracker._since
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: started + 60)
    tracker.record(EVAL)  # starting up is not part of a sweep
    tracker.record(STAGE)
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: started + 90)
    tracker.record(SWEEP)
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: started + 120)
    tracker.record({**SWEEP, "sweep": 1, "generated_tokens": 1_000_000})
    assert lines[2] == "sweep 1/4  trunks 50.0 % in 2.3 turns  weights v3  1,234 tokens  12.0 s  left 1.5 min"
    assert lines[3] == "sweep 2/4  trunks 50.0 % in 2.3 turns  weights v3  1,001,234 tokens  12.0 s  left 1.0 min"


def test_a_run_with_a_budget_of_tokens_is_measured_by_them(tmp_path, monkeypatch):
    config = load_config(None, ["run.aim=false", "run.sweeps=1000", "run.tokens=8000", "cluster.address=elsewhere"])
    lines = []
    tracker = Tracker(config, tmp_path, lines.append)
    started = tracker._since
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: started)
    tracker.record(EVAL)
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: started + 60)
    tracker.record({**STAGE, "generated_tokens": 1500})
    tracker.record({**SWEEP, "generated_tokens": 500})
    tracker.record({**SWEEP, "sweep": 1, "generated_tokens": 7000})
    assert lines[2] == "sweep 1  trunks 50.0 % in 2.3 turns  weights v3  2,000 tokens  12.0 s  left 3.0 min"
    assert lines[3].endswith("9,000 tokens  12.0 s  left 0.0 min")


class AimRun:
    """Writes down what it is told to track."""

    def __init__(self):
        self.tracked = []

    def track(self, value, *, name, step, context):
        self.tracked.append((name, value, step, context))


def test_what_aim_gets_is_every_number_with_the_turn_as_context():
    run = AimRun()
    _to_aim(run, {**STAGE, "failed": {"E: x": 3, "E: y": 1}, "failed_first": {"E: x": "a"}, "trained": 5, "time": 1.0})
    _to_aim(run, {**STAGE, "turn": None})
    assert {context["turn"] for *_, context in run.tracked if "turn" in context} == {2}
    first = {name: value for name, value, step, context in run.tracked if context == {"kind": "stage", "turn": 2}}
    assert (first["failed"], first["filtered"], first["seconds.total"], first["trained"]) == (4, 8, 3.26, 5)
    assert not {"time", "sweep", "turn", "failed_first", "kind"} & set(first)
    assert {"kind": "stage"} in [context for *_, context in run.tracked]


RESUME = {"kind": "resume", "sweep": 1, "stage": 2, "weight_version": 5, "undone": 3, "reason": "the learner was lost", "retired": {}, "failed": {}}


def test_a_resumed_run_takes_back_what_is_done_again(tmp_path, monkeypatch):
    """metrics.jsonl becomes what the ledger says: here the killed process had not yet written one event and had written two too many."""
    first, _, config = tracked(tmp_path)
    for event in (EVAL, {**STAGE, "turn": 1}, STAGE, SWEEP):
        first.record(event)
    first.close("failed")
    with Ledger(tmp_path) as ledger:
        for event in (EVAL, {**STAGE, "generated_tokens": 500}, {**SWEEP, "generated_tokens": 100}, {**STAGE, "turn": 0}, RESUME):
            ledger.append(Progress(), event)
        kept = ledger.events()
    lines = []
    tracker = Tracker(config, tmp_path, lines.append, resume=True)
    since = tracker._since
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: since)
    tracker.record(kept[-1])
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == kept
    assert lines == ["RESUMED at sweep 2, after 2 of its stages, weights v5, 3 steps are done again: the learner was lost"]
    monkeypatch.setattr("rtpo_ray.reports.tracker.time.monotonic", lambda: since + 60)
    tracker.record({**SWEEP, "sweep": 1, "generated_tokens": 66})  # 1 of 4 sweeps was done before: one more took a minute, two are left
    assert lines[1] == "sweep 2/4  trunks 50.0 % in 2.3 turns  weights v3  1,866 tokens  12.0 s  left 2.0 min"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_state_that_could_not_be_saved_is_said():
    assert _lost({"retired": {}, "failed": {}, "unsaved": "CheckpointError: no space"}) == "\n    UNSAVED CheckpointError: no space"
    assert _lost({"retired": {}, "failed": {}, "unsaved": ""}) == ""


def test_evaluation_lines():
    assert eval_line(EVAL) == "eval after 0 sweeps: success 31.2 % sampled, 50.0 % greedy on 256 held-out tasks, 2.0 tool calls, 4 malformed"


def test_episodes_that_ran_out_of_room_are_said(tmp_path):
    assert eval_line({**EVAL, "ends": {"terminated": 192, "overlong": 64}}).endswith("4 malformed  25.0 % OVERLONG (generators.max_model_len)")
    tracker, lines, _ = tracked(tmp_path)
    tracker.record({**SWEEP, "trunk_ends": {"overlong": 3}})
    assert lines[0].endswith("min  100.0 % OVERLONG (generators.max_model_len)")


def test_without_aim_it_is_not_loaded(tmp_path):
    loaded = "aim" in sys.modules
    tracker, _, _ = tracked(tmp_path)
    tracker.record(STAGE)
    tracker.close("finished")
    assert ("aim" in sys.modules) == loaded and not (tmp_path / ".aim").exists() and not (tmp_path.parent / ".aim").exists()


def test_lines_of_a_sweep_and_an_evaluation_of_which_every_episode_failed(tmp_path):
    """Nothing was judged, so there are no means; the first error is what must be read."""
    lost = {"failed": {"KeyError: 'boom'": 4}, "failed_first": {"KeyError: 'boom'": "held-out-0/0"}, "ends": {"failed": 4}}
    line = eval_line({**EVAL, **lost, "success": None, "success_greedy": None, "tool_calls_mean": None})
    assert line.startswith("eval after 0 sweeps: success - sampled, - greedy on 256 held-out tasks, - tool calls")
    assert line.endswith("FAILED 4, first held-out-0/0: KeyError: 'boom'")
    said = []
    tracker = Tracker(Config(run=RunConfig(aim=False)), tmp_path / "run", said.append)
    tracker.record({**SWEEP, **lost, "trunk_success": None, "trunk_turns_mean": None, "trunk_ends": {"failed": 4}})
    tracker.close("failed")
    assert "trunks - in - turns" in said[-1] and said[-1].endswith("FAILED 4, first held-out-0/0: KeyError: 'boom'")
