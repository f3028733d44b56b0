"""The command answers help and configuration errors without loading anything heavy."""

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rtpo_ray import cli, environments
from rtpo_ray.cli import main
from rtpo_ray.config import Config, walk
from rtpo_ray.environments.base import Environment, Observation
from rtpo_ray.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[2]
PROBE = """
import sys
from rtpo_ray import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("HEAVY", [name for name in ("torch", "vllm", "ray", "transformers", "aim", "pyarrow") if name in sys.modules])
sys.exit(code)
"""


def probe(*argv):
    return subprocess.run([sys.executable, "-c", PROBE, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture(autouse=True)
def placement_is_left_to_the_cluster(monkeypatch):
    """As after `ray job submit`: the tests' machine may have one CPU."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


@pytest.mark.parametrize("argv", [("train", "algorithm.args.n_siblings=1"), ("train", "algorithm.name=grpoo"), ("train", "--config", "nowhere.yaml"),
                                  ("evaluate", "run.nmae=x")])
def test_a_configuration_error_exits_2_at_once(argv):
    done = probe(*argv)
    assert done.returncode == 2
    assert "HEAVY []" in done.stdout
    assert done.stderr.startswith("rtpo: configuration error: ") and "Traceback" not in done.stderr


def test_help_lists_every_field_at_once():
    done = probe("train", "--help")
    assert done.returncode == 0
    assert "HEAVY []" in done.stdout
    assert "algorithm.args of rtpo:" in done.stdout and "  n_siblings=8\n" in done.stdout
    missing = [name for name, _, spec in walk(Config()) if f"  {name}=" not in done.stdout or spec.metadata["doc"] not in done.stdout]
    assert missing == []


def test_no_command_and_unknown_options_are_usage_errors(capsys):
    for argv in ([], ["fly"], ["train", "--fast"], ["theory", "run.seed=1"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 2
    assert "usage: rtpo" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "line"), [
    (ConfigError("field a is b"), 2, "rtpo: configuration error: field a is b\n"), (EngineError("lost"), 1, "rtpo: EngineError: lost\n")])
def test_errors_of_a_command_become_exit_codes(monkeypatch, capsys, error, code, line):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "evaluate", fail)
    assert cli.main(["evaluate"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("argv", "part"), [
    (["compare"], "rtpo compare needs --config FILE"), (["compare", "--config", "nowhere.yaml"], "'nowhere.yaml' does not exist")])
def test_a_comparison_needs_its_file(capsys, argv, part):
    assert cli.main(argv) == 2
    assert part in capsys.readouterr().err


def test_a_model_folder_that_does_not_exist_is_a_configuration_error(capsys, tmp_path):
    assert cli.main(["evaluate", "--model", str(tmp_path / "none")]) == 2
    assert f"field model.path is '{tmp_path / 'none'}'; expected a folder that exists" in capsys.readouterr().err


def test_a_second_run_of_the_same_name_is_a_configuration_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "metrics.jsonl").touch()
    assert cli.main(["train", "run.name=twice", f"run.root={tmp_path}", "run.aim=false"]) == 2
    assert "field run.name is 'twice'" in capsys.readouterr().err


def test_a_folder_without_a_model_is_a_configuration_error_that_names_the_one_inside(capsys, tmp_path):
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "config.json").write_text("{}")
    assert main(["evaluate", "--model", str(tmp_path / "run")]) == 2
    assert f"there is no config.json, so it is no Hugging Face folder; did you mean {tmp_path}/run/final?" in capsys.readouterr().err


def test_a_model_that_cannot_be_had_is_a_configuration_error(capsys, monkeypatch):
    def ask(name):
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nand more")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", ask)
    assert main(["evaluate", "--model", "no-such-model"]) == 2
    said = capsys.readouterr().err
    assert "field model.path is 'no-such-model': neither a folder here nor a model that can be had: no-such-model is not a local folder" in said


def test_an_environment_without_demonstrations_needs_a_model(capsys, monkeypatch):
    class Mute(Environment):
        def reset(self, seed):
            return Observation("")

    monkeypatch.setitem(environments.REGISTRY, "lookup", Mute)
    assert main(["evaluate"]) == 2
    assert "field model.path is empty and environment 'lookup' has no scripted demonstrations" in capsys.readouterr().err


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (cli._Terminated(), 143), (ValueError("other"), None)])
def test_a_signal_that_comes_out_of_rays_c_code_is_still_a_signal(monkeypatch, tmp_path, cause, code):
    def events(*args):
        yield {"kind": "resume", "sweep": 0}
        raise SystemError("returned a result with an exception set") from cause

    monkeypatch.setattr("actors.cluster.run_events", events)
    monkeypatch.setattr("actors.cluster.connect", lambda *configs: contextlib.nullcontext())
    closed = []
    tracker = SimpleNamespace(record=lambda event: None, close=closed.append)
    monkeypatch.setattr("rtpo_ray.reports.tracker.Tracker", lambda *args, **options: tracker)
    monkeypatch.setattr(cli, "_model_path", lambda config: "")
    argv = ["train", f"run.root={tmp_path}", "run.name=a"]
    if code is None:
        with pytest.raises(SystemError):
            main(argv)
    else:
        assert main(argv) == code
    assert closed == ["failed" if code is None else "interrupted"]
