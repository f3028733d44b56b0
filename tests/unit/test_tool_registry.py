"""Toolsets by name and options, as a configuration gives them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rtpo_ray.tools import TOOLSETS, Toolset, build, find
from rtpo_ray.tools.calculator import Calculator

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("spec", ["calculator", {"calculator": None}, {"calculator": {}}, {"calculator": {"seconds": 0.5}}])
def test_a_spec_is_a_name_or_a_name_with_its_options(spec):
    toolset = build(spec)
    assert type(toolset) is Calculator
    assert toolset.seconds == 0.5


def test_options_reach_the_toolset(tmp_path):
    (tmp_path / "docs.jsonl").write_text(json.dumps({"title": "A", "text": "apple"}))
    search = build({"search": {"corpus": str(tmp_path / "docs.jsonl"), "top": 7, "cache": str(tmp_path)}})
    assert (search.top, search.search("apple")) == (7, "[1] A: apple")
    mcp = build({"mcp": {"command": "server", "args": ["--quiet"], "stateless": True, "seconds": 5}})
    assert (mcp.address, mcp.stateless, mcp.seconds) == (("server", ("--quiet",), (), ""), True, 5)


@pytest.mark.parametrize(("spec", "error"), [
    ("abacus", "unknown toolset 'abacus'; valid toolsets: python, calculator, search, mcp, or file.py:Class"),
    ({"calculator": {"digits": 3}}, "toolset calculator: unknown option 'digits'; valid options: seconds$"),
    ({"calculator": {"seconds": "3"}}, "toolset calculator: seconds is '3'; expected float"),
    ({"calculator": {"seconds": True}}, "toolset calculator: seconds is True; expected float"),
    ({"calculator": {"seconds": 0}}, "toolset calculator: seconds is 0; expected more than 0"),
    ({"calculator": 3}, "toolset calculator: options are 3; expected a mapping"),
    ({"search": {"top": 3}}, "toolset search: it needs corpus, as in {search: {corpus: ...}}"),
    ({"search": {"corpus": "nowhere.jsonl"}}, "toolset search: corpus is 'nowhere.jsonl': no such file"),
    ({"search": {"corpus": "a.jsonl", "top": 2.5}}, "toolset search: top is 2.5; expected int"),
    ({"mcp": {}}, "toolset mcp: command is '' and url is ''; expected exactly one of them"),
    ({"calculator": {}, "search": {}}, "expected a name, or one name with its options"),
    (["calculator"], "expected a name, or one name with its options"),
    ("none.py:Tools", "no file none.py"),
])
def test_what_is_wrong_with_a_spec_is_said_with_what_is_valid(spec, error):
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        build(spec)


def test_a_toolset_of_the_users_own_is_named_by_its_file(tmp_path, monkeypatch):
    source = "from rtpo_ray.tools import Toolset\nclass Mine(Toolset):\n    def __init__(self, size: int = 1):\n        self.size = size\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    toolset = build({"mine.py:Mine": {"size": 4}})
    assert isinstance(toolset, Toolset)
    assert toolset.size == 4


@pytest.mark.parametrize("name", TOOLSETS)
def test_every_name_stands_for_a_toolset_that_branching_methods_may_ask(name):
    if name == "python":
        pytest.importorskip("rtpo_ray.tools.python", reason="the Python tool is not there yet")
    assert issubclass(find(name), Toolset)
    assert callable(find(name).branching_error)


def test_the_registry_and_its_classes_load_nothing_heavy():
    heavy = ("numpy", "bm25s", "mcp", "pydantic_monty", "torch", "transformers", "pyarrow", "sympy", "jsonschema")
    script = ("import sys, rtpo_ray.tools\nfor name in ('calculator', 'search', 'mcp'):\n    rtpo_ray.tools.find(name)\n"
              f"loaded = [module for module in {heavy!r} if module in sys.modules]\nassert not loaded, loaded")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
