"""Arrows: actors -> pipelines -> rtpo_ray. The science never loads ray, the configuration never loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"rtpo_ray": {"ray", "actors", "pipelines"}, "pipelines": {"actors"}}
LIGHT = ["config", "types", "errors", "options", "cli", "compare", "algorithms", "environments", "environments.lookup", "episodes.contexts",
         "episodes.episode", "episodes.toolcalls", "data", "tools", "tools.calculator", "tools.search", "tools.mcp", "tools.python", "rewards",
         "doctor", "engines.base", "engines.scripted", "reports.tracker", "reports.comparison"]


def files(package):
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


def imported(source):
    """Top-level packages that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            found |= {arg.value.split(".")[0] for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


def test_the_walk_sees_every_kind_of_import():
    source = "import a.b\nfrom c import d\ndef f():\n    import e\n    import_module('g.h')\n    from . import i\n"
    assert imported(source) == {"a", "c", "e", "g"}


@pytest.mark.parametrize("path", [path for package in FORBIDDEN for path in files(package)], ids=str)
def test_arrows_point_one_way(path):
    forbidden = set() if path == Path("rtpo_ray/cli.py") else FORBIDDEN[path.parts[0]]
    assert imported((ROOT / path).read_text()) & forbidden == set()


def test_the_cli_reaches_actors_inside_functions_only():
    source = (ROOT / "rtpo_ray/cli.py").read_text()
    top = "\n".join(ast.unparse(node) for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom)))
    assert imported(source) & FORBIDDEN["rtpo_ray"] == {"actors", "pipelines"}
    assert imported(top) & {"ray", "actors", "pipelines", "torch", "vllm", "transformers"} == set()


def test_no_module_of_the_science_loads_ray_and_the_light_ones_load_nothing_heavy():
    every = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files("rtpo_ray") if path.name != "__main__.py"]
    light = [f"rtpo_ray.{name}" for name in LIGHT]
    script = f"""
import importlib, sys
for names, heavy in (({light!r}, ("ray", "torch", "vllm", "transformers", "pyarrow")), ({every!r}, ("ray", "vllm"))):
    for name in names:
        importlib.import_module(name)
        loaded = [module for module in heavy if module in sys.modules]
        assert not loaded, f"{{name}} loads {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_whoever_holds_a_handle_of_an_actor_loads_nothing_heavy():
    """Ray imports an actor's module in every process that gets a handle of it, sampling tasks included."""
    script = ("import sys, actors.cluster, actors.spawn, actors.learner, pipelines.collect\n"
              "loaded = [module for module in ('torch', 'vllm', 'transformers') if module in sys.modules]\nassert not loaded, loaded")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
