"""What the benchmarks that let two sides take turns make of their answers."""

import sys

from pytest import approx, raises

from tests.bench.onecall import OneCall
from tests.bench.sides import Side, step_of, summary

SECONDS = {"generate": 1.0, "credit": 0.1, "learn": 2.0, "broadcast": 0.5, "other": 0.25, "total": 3.75}


def test_a_step_is_a_sweep_with_its_stages():
    sweep = {"seconds": SECONDS, "trunk_success": 0.5, "generated_tokens": 100, "failed": {"x": 1}}
    stage = {"generated_tokens": 40, "trained_tokens": 30, "trained": 4, "learner_tokens": 90, "failed": {"x": 2, "y": 1}}
    step = step_of(sweep, [stage, stage])
    assert step["seconds"] == 3.75 and step["phases"] == {key: SECONDS[key] for key in ("generate", "credit", "learn", "broadcast", "other")}
    assert (step["generated_tokens"], step["trained_tokens"], step["trained"], step["learner_tokens"], step["failed"]) == (180, 60, 8, 180, 7)


def test_medians_over_turns_and_means_over_steps():
    def answer(seconds, *tokens, cpu):
        return {"seconds": seconds, "steps": [{"generated_tokens": n, "success": n / 100} for n in tokens], "cpu": {"a": cpu, "b": 0.001}}
    found = summary([answer(1.0, 10, 30, cpu=0.5), answer(9.0, 20, 20, cpu=0.75), answer(2.0, 50, 50, cpu=2.0)])
    assert found["seconds_a_step"] == 2.0 and found["each"] == [1.0, 9.0, 2.0]
    assert found["generated_tokens_a_step"] == 30 and found["generated_tokens_a_second"] == 15 and found["success"] == approx(0.3)
    assert found["cpu_seconds_a_step"] == approx(0.751) and found["cpu_by_process"] == {"a": 0.75}


def test_a_side_answers_and_one_that_ends_is_an_error(tmp_path):
    answers = "import sys; [print('noise\\nSIDE {\"seconds\": 0.5, \"steps\": []}', flush=True) for line in sys.stdin if '3' in line]"
    side = Side("echo", [sys.executable, "-c", answers], {}, tmp_path / "log")
    assert side.steps(3, 20) == {"seconds": 0.5, "steps": []}
    side.close()
    broken = Side("broken", [sys.executable, "-c", "input(); raise SystemExit('no more')"], {}, tmp_path / "broken")
    with raises(RuntimeError, match=r"(?s)broken: no answer to 2 steps.*exit code 1.*no more"):
        broken.steps(2, 20)
    broken.close()


def test_one_call_is_graded_by_what_it_looked_up():
    environment = OneCall()
    environment.reset(3)
    call = '<tool_call>{{"name": "lookup", "arguments": {{"entity": "{}", "relation": "{}"}}}}</tool_call>'
    other = next(name for name in environment.facts if environment.facts[name][environment.path[0]] != environment.gold)
    right, wrong = (call.format(name, environment.path[0]) for name in (environment.start, other))
    assert environment.step(wrong).reward == 0
    environment.reset(3)
    step = environment.step(right)
    assert step.reward == 1 and step.terminated and step.observation is None
