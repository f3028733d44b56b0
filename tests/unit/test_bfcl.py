"""BFCL's multi-turn tasks: the recorded solutions, its own checker, branching, and what episodes share."""

import datetime
import importlib
import json
import pickle
import random

import pytest

pytest.importorskip("bfcl_eval")

from chats import chat
from shared_data import shared_data
from worlds import run, settings

from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import Observation
from rtpo_ray.environments.bfcl import BFCL, Simulators, join
from rtpo_ray.episodes.episode import Episode
from rtpo_ray.episodes.toolcalls import ToolCall, format_hermes
from rtpo_ray.errors import DataError
from rtpo_ray.types import Task

SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MODULES = ("gorilla_file_system", "long_context", "math_api", "message_api", "posting_api", "ticket_api", "trading_bot", "travel_booking",
           "vehicle_control")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """All tasks of the base split."""
    out = tmp_path_factory.mktemp("bfcl") / "base.jsonl"
    join(shared_data("bfcl_v4_multi_turn_base.jsonl"), shared_data("bfcl_v4_multi_turn_base_answer.jsonl"), out)
    return [json.loads(line) for line in out.read_text().splitlines()]


def made_row(*, classes, config, question, truth, missed=None):
    return {"question": [[{"role": "user", "content": text}] if text else [] for text in question], "involved_classes": classes,
            "initial_config": config, "ground_truth": truth, "missed_function": missed or {}}


FILES = {"GorillaFileSystem": {"root": {"home": {"type": "directory", "contents": {
    "a.txt": {"type": "file", "content": "b\na"}, "docs": {"type": "directory", "contents": {}}}}}}}
SMALL = made_row(classes=["GorillaFileSystem", "MathAPI"], config=FILES, question=["Sort a.txt.", "Put it into docs.", "Thanks."],
                 truth=[["sort('a.txt')"], ["mv(source='a.txt', destination='docs')"], []])


def start(row, **options):
    environment = BFCL(**options)
    environment.row = row
    return environment, environment.reset(0)


def write(calls):
    return "".join(format_hermes(call.name, call.arguments) for call in calls)


def responses(turns):
    """What a model says that makes these calls, by turn of the user."""
    return [text for calls in turns for text in ([write(calls)] if calls else []) + ["Done."]]


def gold(row):
    environment, _ = start(row)
    return [environment.gold(turn) for turn in range(len(row["question"]))]


def play(row, texts, **options):
    environment, _ = start(row, **options)
    for text in texts:
        step = environment.step(text)
    return step


def public_state(environment):
    return repr(environment.model.public())


def test_a_user_turn_ends_with_a_response_without_calls_and_the_next_request_follows():
    environment, first = start(SMALL)
    assert first == Observation("Sort a.txt.")
    step = environment.step(format_hermes("sort", {"file_name": "a.txt"}))
    assert step.observation == Observation('{"sorted_content": "a\\nb"}', role="tool")
    assert environment.step("It is sorted.").observation == Observation("Put it into docs.")
    assert environment.step(format_hermes("mv", {"source": "a.txt", "destination": "docs"})).observation.role == "tool"
    assert environment.step("Moved.").observation == Observation("Thanks.")
    last = environment.step("You are welcome.")
    assert (last.reward, last.terminated, last.observation) == (1.0, True, None)


@pytest.mark.parametrize(("turns", "reward"), [
    ([["sort"], ["mv"], []], 1.0),
    ([["sort"], ["mv"], ["ls"]], 1.0),  # nothing was to be done, so nothing is judged
    ([["sort", "ls", "ls"], ["ls", "mv"], []], 1.0),  # further calls that change nothing
    ([[], ["sort", "mv"], []], 0.0),  # too late
    ([["sort", "mv"], [], []], 0.0),  # too early: the state after the first turn differs, and the second has no call
    ([["ls"], ["mv"], []], 0.0),  # the right state, but the result was not fetched
    ([["sort"], ["ls"], []], 0.0),  # the wrong state
])
def test_every_turn_is_judged_by_its_state_and_its_results(turns, reward):
    known = {"sort": ToolCall("sort", {"file_name": "a.txt"}), "mv": ToolCall("mv", {"source": "a.txt", "destination": "docs"}),
             "ls": ToolCall("ls", {})}
    assert play(SMALL, responses([[known[name] for name in calls] for calls in turns])).reward == reward


def test_a_result_is_wanted_as_often_as_the_solution_fetched_it_and_may_come_from_an_earlier_turn():
    row = made_row(classes=["MathAPI"], config={}, question=["?", "?"], truth=[["add(1, 2)"], ["add(a=1, b=2)", "add(2, 1)"]])
    add = ToolCall("add", {"a": 1, "b": 2})
    assert play(row, responses([[add], [add]])).reward == 1.0  # 3, and 3 once more: two of the turn's two are there by then
    assert play(row, responses([[add], [ToolCall("add", {"a": 1, "b": 1})]])).reward == 0.0
    assert play(row, responses([[add], []])).reward == 0.0


def test_recorded_solutions_of_all_tasks_get_the_reward(rows):
    assert len(rows) == 200
    steps = [play(row, responses(gold(row))) for row in rows]
    assert (sum(step.reward for step in steps), all(step.terminated for step in steps)) == (200.0, True)


def spoilt(turns, rng):
    """The solution with one thing changed."""
    turns = [list(calls) for calls in turns]
    full = [calls for calls in turns if calls]
    calls = rng.choice(full)
    kind = rng.choice(("leave out", "repeat", "swap", "other value", "move on"))
    if kind == "leave out":
        calls.pop(rng.randrange(len(calls)))
    elif kind == "repeat":
        calls.insert(0, rng.choice(calls))
    elif kind == "swap":
        rng.shuffle(calls)
    elif kind == "other value":
        at = rng.randrange(len(calls))
        calls[at] = ToolCall(calls[at].name, {name: "other" if isinstance(value, str) else value for name, value in calls[at].arguments.items()})
    else:
        turns[-1].append(calls.pop())
    return turns


@pytest.mark.parametrize("seed", range(2))
def test_the_reward_is_that_of_bfcls_own_checker(rows, seed):
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    rng, verdicts = random.Random(seed), []
    for row in rng.sample(rows, 60):
        turns = spoilt(gold(row), rng)
        written = [[[f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})" for call in calls]] if calls else []
                   for calls in turns]
        theirs = multi_turn_checker(written, row["ground_truth"], row, "multi_turn_base", f"seed{seed}")["valid"]
        verdicts.append(theirs)
        assert play(row, responses(turns)).reward == float(theirs), (row["id"], written)
    assert 10 < sum(verdicts) < 50  # both verdicts are met


def test_leaving_out_the_last_call_that_changes_a_state_costs_the_reward(rows):
    found = 0
    for row in random.Random(1).sample(rows, 40):
        turns = gold(row)
        environment, _ = start(row)
        last = None
        for turn, calls in enumerate(turns):
            for place, call in enumerate(calls):
                before = public_state(environment)
                environment.step(write([call]))
                last = (turn, place) if public_state(environment) != before else last
            environment.step("Done.")
        if last is not None:
            found += 1
            del turns[last[0]][last[1]]
            assert play(row, responses(turns)).reward == 0.0, (row["id"], last)
    assert found > 25


def test_a_sibling_starts_in_the_trunks_state_and_ends_as_it_did(rows):
    for row in random.Random(2).sample(rows, 25):
        trunk, _ = start(row)
        texts = responses(gold(row))
        boundaries, steps = [], []
        for text in texts:
            boundaries.append((trunk.state_hash(), trunk.snapshot()))
            steps.append(trunk.step(text))
        assert len({state for state, _ in boundaries}) == len(texts)
        for turn, (state, snapshot) in enumerate(boundaries):
            sibling = BFCL()
            sibling.row = row
            sibling.restore(pickle.loads(pickle.dumps(snapshot)))
            assert sibling.state_hash() == state
            assert [sibling.step(text) for text in texts[turn:]] == steps[turn:]
        replayed, _ = start(row)
        for (state, _), text in zip(boundaries, texts, strict=True):
            assert replayed.state_hash() == state
            replayed.step(text)


@pytest.mark.parametrize("replay", [False, True])
def test_the_episode_loop_branches_at_every_turn(rows, replay):
    row, template = rows[0], chat("chatml")
    texts = responses(gold(row))
    replies = iter([[*template.encode(text), template.tokenizer.eos_token_id] for text in texts])
    limits = settings(max_turns=20, max_model_len=4096, max_response_tokens=500)

    def make():
        return Episode(lambda: BFCL(replay=replay), template, limits)

    trunk = make()
    trunk.reset(Task(task_id="t", seed=1, payload=row))
    rollout = run(trunk, ScriptedEngine(lambda context, sampling: next(replies)), keep_boundaries=True)
    assert (rollout.end, rollout.returns_to_go, len(rollout.boundaries)) == ("terminated", 1.0, len(texts))
    for boundary in rollout.boundaries:
        sibling = make()
        sibling.restore(boundary)  # refuses another state, or another context
        left = iter(texts[boundary.turn:])
        engine = ScriptedEngine(lambda context, sampling, left=left: [*template.encode(next(left)), template.tokenizer.eos_token_id])
        assert run(sibling, engine).returns_to_go == 1.0


def globals_of_the_simulators():
    return {name: {key: repr(value) for key, value in vars(importlib.import_module(f"{SOURCES}.{name}")).items() if not key.startswith("__")}
            for name in MODULES}


@pytest.mark.parametrize("long_context", [False, True])
def test_episodes_leave_no_trace_and_do_not_see_each_other(rows, long_context):
    import mpmath

    chosen = random.Random(3).sample([row for row in rows if "VehicleControlAPI" in row["involved_classes"]], 5) + random.Random(3).sample(rows, 15)
    texts = {row["id"]: responses(gold(row)) for row in chosen}
    before, precision = globals_of_the_simulators(), mpmath.mp.dps
    alone = {row["id"]: [environment.step(text) for text in texts[row["id"]]]
             for row in chosen for environment in [start(row, long_context=long_context)[0]]}
    together = {row["id"]: start(row, long_context=long_context)[0] for row in chosen}
    steps = {name: [] for name in together}
    for turn in range(max(map(len, texts.values()))):
        for name, environment in together.items():
            if turn < len(texts[name]):
                steps[name].append(environment.step(texts[name][turn]))
    assert steps == alone
    assert (globals_of_the_simulators(), mpmath.mp.dps) == (before, precision)


def test_what_simulators_take_from_the_process_is_the_episodes_own():
    import decimal

    import mpmath

    weather = importlib.import_module(f"{SOURCES}.vehicle_control").LONG_WEATHER_EXTENSION
    before = dict(weather), mpmath.mp.dps, decimal.getcontext().prec
    car = Simulators({}, ["VehicleControlAPI"], True)
    assert json.loads(car.call("get_outside_temperature_from_google", {}))["outsideTemperature"] != weather.get("outsideTemperature")
    maths = Simulators({}, ["MathAPI"], False)
    assert maths.call("logarithm", {"value": 2.0, "base": 10.0, "precision": 20}) == "{'result': mpf('0.30102999566398119521336')}"
    assert maths.call("square_root", {"number": 2, "precision": 5}) == "{'result': Decimal('1.4142')}"
    assert (dict(weather), mpmath.mp.dps, decimal.getcontext().prec) == before


def test_the_day_is_the_same_on_every_day():
    travel = Simulators({"TravelAPI": {"user_first_name": "Ada", "user_last_name": "Low"}}, ["TravelAPI"], False)
    young, old = (travel.call("verify_traveler_information", {"first_name": "Ada", "last_name": "Low", "date_of_birth": born,
                                                              "passport_number": "US1"}) for born in ("2006-09-02", "2006-09-01"))
    assert ("at least 18" in young, json.loads(old)["verification_status"]) == (True, True)
    assert importlib.import_module(f"{SOURCES}.travel_booking").datetime is datetime.datetime


def test_functions_are_told_as_json_schemas_and_depend_on_the_task(rows):
    environment, _ = start(SMALL)
    schemas = {schema["function"]["name"]: schema["function"] for schema in environment.tools()}
    assert len(schemas) == 18 + 17
    assert schemas["cd"]["parameters"] == {"type": "object", "required": ["folder"], "properties": {"folder": {
        "type": "string", "description": "The folder of the directory to change to. You can only change one folder level at a time. "}}}
    assert schemas["mean"]["parameters"]["properties"]["numbers"]["items"] == {"type": "number"}
    environment.row = rows[0]
    environment.reset(0)
    assert [schema["function"]["name"] for schema in environment.tools()][0] == "authenticate_twitter"


def test_a_function_that_comes_later_is_told_when_it_comes():
    environment, _ = start(SMALL | {"question": [SMALL["question"][0], [], SMALL["question"][2]], "missed_function": {"1": ["mv"]}})
    assert "mv" not in [schema["function"]["name"] for schema in environment.tools()]
    told = environment.step("I cannot.").observation.text
    assert told.startswith("These functions are available from now on:\n{")
    assert json.loads(told.splitlines()[1])["function"]["name"] == "mv"


def test_errors_are_told_to_the_model_and_are_results_like_any_other():
    row = made_row(classes=["GorillaFileSystem"], config=FILES, question=["?"], truth=[["cd(5)"]])
    environment, _ = start(row)
    step = environment.step(write([ToolCall("cd", {"folder": 5})]))
    assert step.observation.text == "error: cd: 'int' object has no attribute 'rstrip'"
    assert step.info == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 1}
    wrong = environment.step(write([ToolCall("cd", {"name": "docs"}), ToolCall("_load_scenario", {})])).observation.text.splitlines()
    assert wrong[0] == "error: cd: missing a required argument: 'folder'"
    assert wrong[1].startswith("error: no tool named '_load_scenario'; there is cat, cd, ")
    assert environment.step("Done.").reward == 1.0  # the solution failed in the same way
    assert play(row, ["Done."]).reward == 0.0


def test_too_many_calls_in_a_turn_truncate_the_episode():
    environment, _ = start(SMALL, max_calls=3)
    look = ToolCall("ls", {})
    assert environment.step(write([look, look])).observation is not None
    environment.step("Done.")
    assert environment.step(write([look, look, look])).observation is not None
    step = environment.step(write([look]))
    assert (step.truncated, step.terminated, step.reward, step.observation) == (True, False, 0.0, None)


@pytest.mark.parametrize("text", ["sort", "sort(", "__import__('os').system('ls')", "sort(open('a'))", "sort(file='a')", "unknown()"])
def test_a_solution_is_read_and_never_evaluated(text):
    environment, _ = start(SMALL | {"ground_truth": [[text], [], []]})
    with pytest.raises(DataError, match="field ground_truth holds .*expected a call of one of the task's functions with literals"):
        environment.gold(0)


def test_mistakes_are_named(tmp_path):
    environment = BFCL()
    environment.row = {"question": []}
    with pytest.raises(DataError, match="the row of the task lacks initial_config, involved_classes, ground_truth, missed_function; it has question"):
        environment.reset(0)
    with pytest.raises(ValueError, match="max_calls is 0; expected at least 1"):
        BFCL(max_calls=0)
    for name, ids in (("questions.json", ["a", "b"]), ("answers.json", ["a"])):
        (tmp_path / name).write_text("".join(json.dumps({"id": given, "ground_truth": []}) + "\n" for given in ids))
    with pytest.raises(DataError, match="has no answer to 1 of the 2 tasks of .*questions.json, such as b; give the two files of the same split"):
        join(tmp_path / "questions.json", tmp_path / "answers.json", tmp_path / "out")
