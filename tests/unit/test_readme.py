"""What the README shows works as it is shown."""

import re
import shlex
from pathlib import Path

import pytest
from chats import chat
from omegaconf import OmegaConf

from rtpo_ray import cli
from rtpo_ray.config import load_config
from rtpo_ray.doctor import Doctor

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.partition("#")[0].strip() for kind, block in BLOCKS if not kind for line in block.splitlines()
            if line.startswith("rtpo ") and "--help" not in line]


def block(kind, start):
    (found,) = [text for name, text in BLOCKS if name == kind and text.startswith(start)]
    return found


def test_the_environment_that_it_shows_is_sound_and_takes_twenty_lines(tmp_path, monkeypatch):
    source = block("python", "# my_env.py")
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(source)
    config = load_config(None, ["environment.path=my_env.py:Echo", "cluster.local_cpus=64"])
    found = list(Doctor(config, chat("chatml")).examine())
    assert [finding.text for finding in found if finding.kind != "ok"] == []
    assert len(found) == 9


def test_the_questions_that_it_shows_are_a_configuration(tmp_path, monkeypatch):
    (tmp_path / "question.yaml").write_text(block("yaml", "environment:\n  name: question"))
    config = load_config(tmp_path / "question.yaml", ["cluster.address=elsewhere"])
    assert config.environment.args["prompt"] == "{question} Put the answer in \\boxed{{}}."
    assert OmegaConf.to_container(OmegaConf.structured(config))["data"]["fields"] == {"question": "problem"}


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_understood(command):
    words = shlex.split(command)
    assert words[0] == "rtpo"
    args = cli._parse(words[1:])
    for file in getattr(args, "config", []):
        assert (ROOT / file).is_file()


def test_it_has_commands():
    assert len(COMMANDS) >= 15
