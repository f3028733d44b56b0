"""Options of methods, and methods that are named by file and class: every mistake says what is valid."""

import dataclasses
import textwrap

import pytest
from records import group, trunk

from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Algorithm
from rtpo_ray.config import AlgorithmConfig, load_config
from rtpo_ray.errors import ConfigError
from rtpo_ray.options import complaint, opt


@dataclasses.dataclass
class Fields:
    plain: float = opt(0.0, "any number")
    bounded: float = opt(1.0, "in [0, 2]", least=0, most=2, why="less is nothing")
    positive: float = opt(1.0, "more than 0", above=0)
    chosen: str = opt("a", "one of two", choices=("a", "b"))


SPECS = {spec.name: spec for spec in dataclasses.fields(Fields)}


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("plain", -1e9, ""), ("plain", float("nan"), "nan; expected a finite number"), ("plain", float("-inf"), "-inf; expected a finite number"),
    ("bounded", 0, ""), ("bounded", 2.0, ""), ("bounded", -0.1, "-0.1; expected at least 0 (less is nothing)"),
    ("bounded", 2.1, "2.1; expected at most 2"),
    ("positive", 1e-9, ""), ("positive", 0, "0; expected more than 0"), ("chosen", "b", ""), ("chosen", "c", "'c'; valid choices: a, b")])
def test_complaints(name, value, expected):
    assert complaint(value, SPECS[name]) == expected


def test_a_field_keeps_its_documentation():
    assert SPECS["bounded"].metadata["doc"] == "in [0, 2]" and Fields().bounded == 1.0
    assert complaint(3, dataclasses.field(default=1)) == ""  # a field of someone else's


@pytest.mark.parametrize(("name", "args", "message"), [
    ("rtpo", {"n_sibling": 3}, r"n_sibling is no option of rtpo \(did you mean n_siblings\?\); valid: n_trunks, clip_low.*merge_groups"),
    ("grpo", {"zzz": 3}, r"^zzz is no option of grpo; valid: n_trunks"),
    ("rtpo", {"n_siblings": 1}, r"n_siblings is 1; expected at least 2 \(one sibling is its own baseline, so its advantage is always 0\)"),
    ("rtpo", {"n_siblings": 2.0}, "n_siblings is 2.0; expected int"), ("rtpo", {"n_siblings": True}, "n_siblings is True; expected int"),
    ("rtpo", {"merge_groups": 1}, "merge_groups is 1; expected bool"), ("rtpo", {"clip_low": "x"}, "clip_low is 'x'; expected float"),
    ("rtpo", {"kl_coef": float("nan")}, "kl_coef is nan; expected a finite number"),
    ("rtpo", {"rho_max": 0.0}, "rho_max is 0.0; expected more than 0"),
    ("seeupo", {"carry": "sum"}, "carry is 'sum'; valid choices: product, geometric"), ("ppo", {"gamma": 1.1}, "gamma is 1.1; expected at most 1"),
    ("grpo", {"n_trunks": None}, "n_trunks is None; expected int"),
    ("rtop", {}, r"'rtop'; valid choices: rtpo, seeupo, grpo.*, or file.py:Class for one of your own \(did you mean rtpo\?\)"),
    ("zzz", {}, "^'zzz'; valid choices: rtpo"), ("methods.py", {}, "'methods.py'; valid choices"),
])
def test_wrong_methods_and_options_are_named_with_what_is_valid(name, args, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(name, args)


@pytest.mark.parametrize(("name", "args", "message"), [
    ("rtpo", {"clip_low": 1.0}, "clip_low is 1.0; expected less than 1"), ("gspo", {"clip_low": 1}, "clip_low is 1; expected less than 1"),
    ("rtpo", {"sync_every": 0, "rho_min": 3.0, "rho_max": 2.0}, "rho_min is 3.0 and rho_max is 2.0; expected rho_min <= rho_max"),
    ("rtpo", {"rho_min": 0.5}, "rho_min is 0.5 and rho_max is 1.0 with sync_every 1"),
    ("arpo", {"n_trunks": 17}, r"budget is 16; expected at least n_trunks \(17\)"),
])
def test_options_that_exclude_each_other_are_named(name, args, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(name, args).check(max_turns=3)


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_every_method_can_be_built_with_its_defaults_and_from_a_configuration(name):
    made = algorithms.build(AlgorithmConfig(name=name, args={"epochs": 2}))
    made.check(max_turns=1)
    assert type(made) is algorithms.REGISTRY[name] and made.epochs == 2
    assert made == algorithms.make(name, {"epochs": 2}) != algorithms.make(name, {})


@pytest.mark.parametrize("name", algorithms.REGISTRY)
def test_every_option_is_documented_and_its_default_valid(name):
    for spec in dataclasses.fields(algorithms.REGISTRY[name]):
        assert len(spec.metadata["doc"]) > 5 and complaint(spec.default, spec) == "", spec.name


# --- a method from somewhere else

MINE = """
    from __future__ import annotations

    from collections.abc import Sequence
    from dataclasses import dataclass

    from rtpo_ray.algorithms.base import Algorithm, Credit
    from rtpo_ray.algorithms.credit import per_trajectory, returns
    from rtpo_ray.options import opt
    from rtpo_ray.types import Group

    LOADED = []

    @dataclass(frozen=True, kw_only=True)
    class Mine(Algorithm):
        scale: float = opt(2.0, "of the advantage", above=0)

        def credit(self, group: Group) -> Sequence[Credit]:
            return per_trajectory(group, [self.scale * value for value in returns(group)])

    class Stranger:
        pass

    def credit(group):
        return []
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "deep" / "my_method.py"
    path.parent.mkdir()
    path.write_text(textwrap.dedent(MINE))
    return path


def test_a_method_from_a_file_is_built_like_any_other(file, monkeypatch):
    made = algorithms.make(f"{file}:Mine", {"scale": 3, "epochs": 2})
    assert isinstance(made, Algorithm) and (made.scale, made.epochs, made.branching) == (3, 2, False)
    credits = made.credit(group(trunk("t/0", 1.0), trunk("t/1", 0.5), name="t", turn=None))
    assert [(c.advantage, c.weight) for c in credits] == [(3.0, 0.5), (1.5, 0.5)]
    assert algorithms.find(f"{file}:Mine") is type(made)  # loaded once
    monkeypatch.chdir(file.parent)
    assert algorithms.find("my_method.py:Mine") is type(made)  # relative to where one stands, and still the same
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    config = load_config(None, [f"algorithm.name={file}:Mine", "algorithm.args.scale=0.5"])
    assert algorithms.build(config.algorithm) == algorithms.make(f"{file}:Mine", {"scale": 0.5})


def test_options_of_a_method_from_a_file_are_checked(file, monkeypatch):
    for args, message in (({"scal": 1.0}, r"scal is no option of .*my_method.py:Mine \(did you mean scale\?\)"),
                          ({"scale": 0}, "scale is 0; expected more than 0"),
                          ({"scale": "x"}, "scale is 'x'; expected float"), ({"n_siblings": 2}, "n_siblings is no option of")):
        with pytest.raises(ValueError, match=message):
            algorithms.make(f"{file}:Mine", args)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    with pytest.raises(ConfigError, match="field algorithm.args.scale is 0; expected more than 0"):
        load_config(None, [f"algorithm.name={file}:Mine", "algorithm.args.scale=0"])


@pytest.mark.parametrize(("attribute", "message"), [
    ("Stranger", "defines no class Stranger that extends rtpo_ray.algorithms.base.Algorithm"), ("credit", "defines no class credit"),
    ("LOADED", "defines no class LOADED"), ("Nothing", "defines no class Nothing"), ("", "defines no class")])
def test_a_class_that_is_no_method_is_refused(file, attribute, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(f"{file}:{attribute}", {})


def test_a_file_that_does_not_exist_is_named_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"'nowhere.py:Mine': no file nowhere.py in {tmp_path}"):
        algorithms.find("nowhere.py:Mine")


@pytest.mark.parametrize(("text", "message"), [
    ("def broken(:", "cannot be imported: SyntaxError"), ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
    ("raise RuntimeError('odd')", "cannot be imported: RuntimeError: odd"),
    ("from rtpo_ray.algorithms.grpo import Grpo\nclass Mine(Grpo):\n    scale: float = 2.0", "Mine is no dataclass of its own; put @dataclass")])
def test_a_file_that_makes_no_method_says_why(tmp_path, monkeypatch, text, message):
    (tmp_path / "bad_method.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        algorithms.find(f"{tmp_path}/bad_method.py:Mine")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    with pytest.raises(ConfigError, match=f"field algorithm.name is .*{message}"):
        load_config(None, [f"algorithm.name={tmp_path}/bad_method.py:Mine"])
