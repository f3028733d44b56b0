"""A question out of a file: its prompt from the row, its tools and its grader by name, its answer judged."""

import pytest
from chats import chat

from rtpo_ray import environments
from rtpo_ray.config import hash_config, load_config
from rtpo_ray.environments.base import Observation, Step
from rtpo_ray.environments.question import Question
from rtpo_ray.episodes.toolcalls import format_hermes
from rtpo_ray.errors import ConfigError, GraderError

ROW = {"question": "What is 6 * 7?", "answer": "42"}


def asked(**options):
    made = Question(**{"grader": "math", "tools": ["calculator"], **options})
    made.row = ROW
    return made, made.reset(0)


def test_a_call_is_run_and_an_answer_is_judged():
    world, first = asked(prompt="{question} Put it in \\boxed{{}}.", system="be brief")
    assert (first, world.system, world.fields) == (Observation("What is 6 * 7? Put it in \\boxed{}."), "be brief", ("question", "answer"))
    assert [schema["function"]["name"] for schema in world.tools()] == ["calculate"]
    step = world.step(format_hermes("calculate", {"expression": "6 * 7"}))
    assert (step.observation, step.info) == (Observation("42", role="tool"), {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 0})
    assert world.step("<think>7 * 6</think> It is \\boxed{42}.") == Step(reward=1.0, terminated=True)
    assert world.step("It is \\boxed{41}.") == Step(reward=0.0, terminated=True)
    world.close()


def test_examples_stand_before_the_question():
    said = [{"user": "What is 1 + 1?"}, {"assistant": "2"}]
    world, first = asked(examples=said)
    assert first == Observation(ROW["question"], before=(("user", "What is 1 + 1?"), ("assistant", "2")))
    template = chat("chatml")
    messages, _ = template.opening("", [], first)
    assert template.render(messages, [], prompt=True) == (
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n"
        "<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="examples hold {'model': 'x'}; expected messages such as"):
        Question(examples=[{"model": "x"}])


def test_a_sibling_has_the_tools_state_and_the_row_of_its_own_task():
    world, _ = asked()
    world.step(format_hermes("calculate", {"expression": "x = 6 * 7"}))
    snapshot, state = world.snapshot(), world.state_hash()
    other = Question(grader="math", tools=["calculator"])
    other.row = {**ROW, "answer": "43"}
    other.restore(snapshot)
    assert other.state_hash() == state
    assert other.step(format_hermes("calculate", {"expression": "x + 1"})).observation.text == "43"
    assert other.step("43").reward == 1.0 and world.step("43").reward == 0.0
    assert b"What is" not in snapshot


def test_what_a_grader_cannot_tell_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("from rtpo_ray.rewards.base import Grader\nfrom rtpo_ray.errors import GraderError\n"
                                        "class Broken(Grader):\n    fields = ('gold',)\n    def grade(self, response, row):\n"
                                        "        raise GraderError('cannot tell')\n")
    monkeypatch.chdir(tmp_path)
    world, _ = asked(grader="broken.py:Broken")
    assert world.fields == ("question", "gold")
    with pytest.raises(GraderError, match="cannot tell"):
        world.step("42")


@pytest.mark.parametrize(("options", "instant"), [
    ({"grader": "exact", "tools": []}, True), ({"grader": "math", "tools": []}, False), ({"grader": "exact", "tools": ["calculator"]}, False)])
def test_it_is_instant_when_its_grader_and_tools_are(options, instant):
    assert asked(**options)[0].instant == instant


DATA = ["environment.name=question", "cluster.address=elsewhere", "data.train=a.jsonl", "data.held_out_share=0.1"]


@pytest.mark.parametrize(("overrides", "wrong"), [
    (["environment.args={grader: maths}"], "grader is 'maths'; valid names: math, exact"),
    (["environment.args={tools: [abacus]}"], "unknown toolset 'abacus'; valid toolsets: python, calculator"),
    (["environment.args={prompt: why}"], "prompt is 'why'; expected fields of the row in braces"),
    (["environment.args={prompt: '{}'}"], "prompt is '{}'; expected fields of the row in braces"),
    (["data.fields={problem: question}"], "unknown field data.fields.problem: environment 'question' reads question, answer"),
    (["data.train=''"], "field data.train is empty, but environment 'question' reads question, answer of every task from files"),
    (["data.held_out_share=0"], "field data.held_out is empty and data.held_out_share is 0, so there is nothing to evaluate on"),
    (["environment.name=lookup"], "field data.train is 'a.jsonl', but environment 'lookup' makes its tasks from seeds"),
    (["data.train=''", "data.held_out=a.jsonl"], "field data.train is empty; expected files to train on"),
    (["environment.args={tools: [{mcp: {command: server}}]}"], "algorithm.name=rtpo: .*cannot be copied"),
])
def test_what_does_not_go_together_is_said_before_a_run(overrides, wrong):
    with pytest.raises(ConfigError, match=wrong):
        load_config(None, [*DATA, *overrides])


def test_a_server_without_copies_serves_methods_that_do_not_branch():
    tools = ["environment.args={tools: [{mcp: {command: server}}]}", "algorithm.name=grpo"]
    assert load_config(None, [*DATA, *tools]).algorithm.name == "grpo"


def test_files_are_looked_for_where_the_run_will_be(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = ["cluster.address=''", "cluster.local_cpus=64"]
    with pytest.raises(ConfigError, match=r"field data\.train is 'a\.jsonl': there is no such file in"):
        load_config(None, [*DATA, *here])
    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(None, [*DATA, *here]).data.train == "a.jsonl"
    alone = ["data.train=''", "data.held_out=a.jsonl", "data.held_out_share=0"]
    assert load_config(None, [*DATA, *here, *alone], learn=False).data.held_out == "a.jsonl"
    corpus = "environment.args={grader: f1, tools: [{search: {corpus: gone.jsonl}}]}"
    with pytest.raises(ConfigError, match=r"corpus is 'gone\.jsonl': no such file"):
        load_config(None, [*DATA, *here, corpus])
    assert load_config(None, [*DATA, corpus]).cluster.address == "elsewhere"


@pytest.mark.parametrize(("overrides", "wrong"), [
    (["data.held_out=a.jsonl", "data.held_out_share=0"], r"field data\.held_out is 'a\.jsonl': .*a\.jsonl is among the files of data\.train too"),
    (["data.held_out=b.jsonl"], "field data.held_out_share is 0.1 beside data.held_out"),
    (["data.train=hub"], r"field data\.train is 'hub', a folder of several splits \(test, train\); name the files of one"),
])
def test_tasks_that_are_held_out_are_not_trained_on(tmp_path, monkeypatch, overrides, wrong):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "hub/data/train-0.jsonl", "hub/data/test-0.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(ConfigError, match=wrong):
        load_config(None, [*DATA, "cluster.address=''", "cluster.local_cpus=64", *overrides])


@pytest.mark.parametrize(("args", "wrong"), [
    ("{tools: python}", "tools is 'python'; expected a list"),
    ("{grader: {exact: {whole: 'no'}}}", "the grader 'exact': whole is 'no'; expected bool"),
    ("{grader: {math: {workers: two}}}", "the grader 'math': workers is 'two'; expected int"),
])
def test_options_of_another_type_are_refused(args, wrong):
    with pytest.raises(ConfigError, match=wrong):
        load_config(None, [*DATA, f"environment.args={args}"])


def test_a_step_must_be_given_the_time_that_its_parts_may_take():
    judge = "environment.args={grader: {judge: {url: 'http://127.0.0.1:1/v1', model: m, seconds: 30}}}"
    with pytest.raises(ConfigError, match=r"field environment\.step_timeout is 60, but what 'question' waits for in a step may take 114 s"):
        load_config(None, [*DATA, judge])
    assert load_config(None, [*DATA, judge, "environment.step_timeout=115"]).environment.step_timeout == 115


def test_why_a_server_cannot_branch_says_no_secret(monkeypatch):
    monkeypatch.setenv("MCP_KEY", "s3cr3t-value")
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*DATA, "environment.args={tools: [{mcp: {command: server, args: [--key, 'env:MCP_KEY']}}]}"])
    assert "cannot be copied" in str(caught.value) and "s3cr3t" not in str(caught.value)
    without = load_config(None, [*DATA, "environment.args={tools: [{mcp: {command: server, args: [--key, 'env:MCP_KEY']}}]}"], learn=False)
    assert without.environment.name == "question"  # an evaluation branches nowhere


def test_a_prompt_that_mentions_a_file_is_no_file():
    prompt = "environment.args={prompt: '{question} Put the code in main.py: now'}"
    assert hash_config(load_config(None, [*DATA, prompt])) != hash_config(load_config(None, DATA))


def test_two_files_of_one_name_are_two_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tools.py").write_text(
            f"from rtpo_ray.tools import Toolset, tool\nclass {folder.upper()}(Toolset):\n    def __init__(self):\n        self.own = '{folder}'\n")
    world = Question(grader="exact", tools=["a/tools.py:A", "b/tools.py:B"])
    before = world.state_hash()
    world.restore(world.snapshot())
    assert world.state_hash() == before and [toolset.own for toolset in world.toolsets] == ["a", "b"]


def test_it_is_made_by_its_name():
    config = load_config(None, [*DATA, "environment.args={tools: [calculator], grader: {math: {seconds: 3}}}"])
    world = environments.build(config.environment)
    assert isinstance(world, Question) and world._grader.seconds == 3


def test_the_source_of_its_own_tools_and_grader_is_part_of_the_configurations_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own.py"
    file.write_text("from rtpo_ray.tools import Toolset\nclass Own(Toolset):\n    pass\n")
    config = load_config(None, [*DATA, "environment.args={tools: [{'own.py:Own': {}}]}"])
    before = hash_config(config)
    file.write_text(file.read_text() + "# another\n")
    assert hash_config(config) != before
