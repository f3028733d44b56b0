"""`rtpo doctor` names what is wrong with an environment, and finds nothing where nothing is."""

import json
import re

import pytest
from chats import chat

from rtpo_ray.config import load_config
from rtpo_ray.doctor import Doctor, show

WORLD = '''
import itertools, os, random
from rtpo_ray.environments.base import Observation, Step, ToolEnvironment, tool

class World(ToolEnvironment):
    {declared}
    def __init__(self, kind: str = "good"):
        super().__init__()
        self.kind, self.said = kind, []
        self.open = (i for i in ()) if kind == "uncopied" else None

    def reset(self, seed: int) -> Observation:
        self.rng = random.Random(None if self.kind == "unseeded" else seed)
        self.said, self.secret = [], self.rng.randint(0, 999)
        if self.kind == "raises":
            raise RuntimeError("no world today")
        if self.kind == "text":
            return "hello"
        return Observation(("long " * 400 if self.kind == "long" else "") + f"Add up to {{self.secret}}.")

    @tool
    def add(self, number: int, note: str = "") -> str:
        """{doc}

        Args:
            number: to add
            {note}
        """
        self.said.append(number)
        drawn = self.rng.random() if self.kind != "entropy" else random.SystemRandom().random()
        return f"{{sum(self.said)}} {{drawn:.3f}}"

    def answer(self, text: str) -> Step:
        return Step(reward=3.0 if self.kind == "rich" else "much" if self.kind == "word" else float(text == "42"), terminated=True)
'''


def examine(tmp_path, monkeypatch, *overrides, declared="instant = False", doc="Add a number.", note="note: why", args="{}", family="qwen3"):
    """{what was looked at: (kind, text)} and the doctor."""
    monkeypatch.chdir(tmp_path)
    file = f"world{len(list(tmp_path.iterdir()))}.py"  # a file is loaded once
    (tmp_path / file).write_text(WORLD.format(declared=declared, doc=doc, note=note))
    config = load_config(None, [f"environment.path={file}:World", f"environment.args={args}", "environment.max_turns=4", "cluster.local_cpus=64",
                                "generators.max_model_len=2048", *overrides])
    doctor = Doctor(config, chat(family))
    found = {}
    for finding in doctor.examine():
        found.setdefault(finding.text.partition(":")[0], []).append((finding.kind, finding.text))
    return found, doctor


def test_a_sound_environment_passes_every_look(tmp_path, monkeypatch):
    found, doctor = examine(tmp_path, monkeypatch, family="chatml")
    assert {kind for lines in found.values() for kind, _ in lines} == {"ok"}, found
    assert list(found) == ["tools", "template", "contexts", "episodes", "determinism", "branching", "rewards", "masks", "seconds"]
    assert "branching: 24 boundaries restored by its snapshot" in found["branching"][0][1]
    lines = list(show(doctor.sample, chat("chatml"), colour=False))
    first = doctor.sample.turns[0]
    assert lines[0] == f"turn 0: {len(first.context_ids)} tokens of context, {len(first.response_ids)} sampled and trained"
    assert lines[1].count("[") == len(first.response_ids) and lines[1].endswith("[<|im_end|>]")
    coloured = list(show(doctor.sample, chat("chatml"), colour=True))
    assert coloured[1].count("\033[32") == len(first.response_ids) and coloured[1].startswith("\033[2m<|im_start|>")


@pytest.mark.parametrize(("kind", "look", "expected"), [
    ("unseeded", "determinism", ("FAIL", "played twice from the same seed with the same responses: turn 0: state_hash is")),
    ("entropy", "determinism", ("FAIL", "turn 0: observation is")),
    ("uncopied", "episodes", ("FAIL", "cannot pickle 'generator' object")),
    ("long", "contexts", ("FAIL", "leaves no room for a response")),
    ("raises", "tools", ("FAIL", "tools: RuntimeError: no world today")),
    ("rich", "rewards", ("warn", "returns from 3 to 3")),
])
def test_what_is_wrong_is_named(tmp_path, monkeypatch, kind, look, expected):
    extra = ["generators.max_model_len=512"] if kind == "long" else []
    found, _ = examine(tmp_path, monkeypatch, *extra, args=f"{{kind: {kind}}}")
    assert any(level == expected[0] and expected[1] in text for level, text in found[look]), found


def test_a_state_that_snapshots_do_not_hold_is_found(tmp_path, monkeypatch):
    found, _ = examine(tmp_path, monkeypatch, declared="unsaved = ('said',)")
    assert found["determinism"][0][0] == "ok"
    assert any(kind == "FAIL" and "restored at turn" in text and "observation is" in text for kind, text in found["branching"]), found
    found, _ = examine(tmp_path, monkeypatch, "algorithm.name=grpo", declared="unsaved = ('said',)")
    assert any(kind == "warn" for kind, _ in found["branching"])  # which does not branch


def test_tools_without_words_and_templates_without_tools_are_found(tmp_path, monkeypatch):
    found, _ = examine(tmp_path, monkeypatch, note="")
    assert len(found) == 1 and found["tools"][0][0] == "FAIL" and "the docstring has no description for the argument 'note'" in found["tools"][0][1]
    found, _ = examine(tmp_path, monkeypatch, family="llama")
    assert found["template"] == [("warn", "template: the first context does not show add; set environment.tools_in=system, or train a model "
                                          "that knows")]


SLOW = """instant = True

    def state_hash(self):
        return [super(World, self).state_hash() for _ in range(40)][0]
"""


def test_a_slow_environment_that_says_it_is_instant_is_found(tmp_path, monkeypatch):
    found, _ = examine(tmp_path, monkeypatch, declared=SLOW)
    assert found["seconds"][0][0] == "warn" and "declared instant" in found["seconds"][0][1]


def rows(tmp_path, *answers):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"problem": f"what is {answer}?", "answer": answer}) + "\n" for answer in answers))


def question(tmp_path, monkeypatch, *overrides):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["environment.name=question", "environment.args={grader: exact}", "data.train=rows.jsonl", "data.held_out_share=0.5",
                                "cluster.local_cpus=64", "environment.max_turns=2", *overrides])
    return list(Doctor(config, chat("chatml")).examine())


def test_rows_and_gold_answers_are_looked_at(tmp_path, monkeypatch):
    rows(tmp_path, "42", "Paris", "x")
    found = {finding.text: finding.kind for finding in question(tmp_path, monkeypatch, "data.fields.question=problem")}
    assert found["rewards: 3 of 3 gold answers are judged right"] == "ok" and "FAIL" not in found.values()
    (finding,) = question(tmp_path, monkeypatch)
    assert finding.kind == "FAIL"
    assert "has no column 'question', which the environment reads as its field question; it has problem, answer" in finding.text
    (tmp_path / "rows.jsonl").write_text("")
    (finding,) = question(tmp_path, monkeypatch)
    assert finding.text == "data: field data.train is 'rows.jsonl': its files hold no row"


@pytest.mark.parametrize(("kind", "expected"), [
    ("raises", r"tools: RuntimeError: no world today \(world0\.py, line \d+, in reset\); a tool raises ToolError for what the model is to read"),
    ("uncopied", r"cannot pickle 'generator' object.*; an attribute cannot be copied into a snapshot: name it in `unsaved`"),
    ("unseeded", r"; take all randomness from the seed that reset is given"),
    ("text", r"tools: TypeError: World\.reset returned 'hello'; expected an Observation"),
    ("word", r"episodes: TypeError: World\.step returned Step\(.*reward='much'.*; expected a Step whose reward is a number"),
])
def test_it_says_where_it_was_and_what_to_do(tmp_path, monkeypatch, kind, expected):
    found, _ = examine(tmp_path, monkeypatch, args=f"{{kind: {kind}}}")
    assert any(re.search(expected, text) for lines in found.values() for level, text in lines if level == "FAIL"), found


def test_a_worked_solution_is_not_cut_when_it_is_judged(tmp_path, monkeypatch):
    rows(tmp_path, "first this then that " * 40 + "#### 42")
    overrides = ["data.fields.question=problem", "environment.args={grader: math}", "sampling.max_response_tokens=8", "generators.max_model_len=2048"]
    found = {finding.text: finding.kind for finding in question(tmp_path, monkeypatch, *overrides)}
    assert found.get("rewards: 1 of 1 gold answers are judged right") == "ok", found


def test_held_out_rows_are_looked_at_too_and_the_first_wrong_gold_is_named(tmp_path, monkeypatch):
    rows(tmp_path, "42", "43")
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"problem": "?", "answer": answer}) + "\n" for answer in ("44", "a\x00b")))
    overrides = ["data.fields.question=problem", "data.held_out=held.jsonl", "data.held_out_share=0"]
    assert "rewards: 4 of 4 gold answers are judged right" in {finding.text for finding in question(tmp_path, monkeypatch, *overrides)}
    (tmp_path / "held.jsonl").write_text(json.dumps({"problem": "?", "answer": ""}) + "\n")
    texts = [finding.text for finding in question(tmp_path, monkeypatch, *overrides) if finding.kind == "FAIL"]
    assert any("the row's field 'answer' is ''; expected a text" in text for text in texts), texts
