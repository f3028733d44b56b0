"""A secret is named in the configuration, read where it is used, and written down nowhere."""

import json

import pytest

from rtpo_ray import environments
from rtpo_ray.config import hash_config, load_config, to_yaml
from rtpo_ray.errors import ConfigError
from rtpo_ray.reports.tracker import Tracker
from rtpo_ray.secrets import reveal

WORLD = '''
from rtpo_ray.environments.base import Environment, Observation, Step

class Paid(Environment):
    def __init__(self, key: str = "", headers: dict = None):
        super().__init__()
        if len(key) < 3:
            raise ValueError("a key has at least 3 letters")
        self.paid = (key, headers)

    def reset(self, seed):
        return Observation("x")

    def step(self, text):
        return Step(terminated=True)
'''
SECRET = "hunter2-and-more"


@pytest.fixture
def overrides(tmp_path):
    (tmp_path / "paid.py").write_text(WORLD)
    return [f"environment.path={tmp_path}/paid.py:Paid", "environment.args.key=env:SEARCH_KEY", "environment.args.headers={auth: [env:SEARCH_KEY]}"]


def test_the_environment_gets_it_and_nothing_that_is_kept_does(overrides, monkeypatch, tmp_path):
    monkeypatch.setenv("SEARCH_KEY", SECRET)
    config = load_config(None, [*overrides, "run.aim=true", f"run.root={tmp_path / 'runs'}"])
    assert environments.build(config.environment).paid == (SECRET, {"auth": [SECRET]})
    lines = []
    tracker = Tracker(config, tmp_path / "runs" / "run", lines.append)
    tracker.close("finished")
    written = [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(written) > 3 and not any(SECRET.encode() in content for content in written)
    assert any(b"env:SEARCH_KEY" in content for content in written) and SECRET not in "".join(lines) + to_yaml(config)
    other = hash_config(config)
    monkeypatch.setenv("SEARCH_KEY", "another")
    assert hash_config(config) == other


def test_one_that_is_not_set_is_named_where_it_will_be_used(overrides, monkeypatch):
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="env:SEARCH_KEY: the environment variable SEARCH_KEY is not set"):
        load_config(None, overrides)
    assert load_config(None, [*overrides, "cluster.address=elsewhere:1"]).environment.args["key"] == "env:SEARCH_KEY"


def test_a_constructor_that_refuses_it_does_not_show_it(overrides, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "no")
    with pytest.raises(ConfigError, match="a key has at least 3 letters") as caught:
        load_config(None, overrides)
    assert "'no'" not in str(caught.value) and "env:SEARCH_KEY" in str(caught.value)


@pytest.mark.parametrize("how", ["override", "file"])
def test_what_omegaconf_would_write_down_is_refused(how, monkeypatch, tmp_path):
    monkeypatch.setenv("SEARCH_KEY", SECRET)
    path = tmp_path / "mine.yaml"
    path.write_text("environment:\n  args:\n    key: ${oc.env:SEARCH_KEY}\n")
    with pytest.raises(ConfigError, match=r"would write the variable's value into config\.yaml; name a secret as env:NAME") as caught:
        load_config(path if how == "file" else None, [] if how == "file" else ["environment.args.key=${oc.env:SEARCH_KEY}"])
    assert SECRET not in str(caught.value)


def test_only_whole_strings_name_a_variable(monkeypatch):
    monkeypatch.setenv("A", "1")
    value = {"a": "env:A", "b": ["env:A", ("env:A",), 3], "c": "the env:A", "d": "env:", "e": "env:not a name", "f": None}
    assert reveal(value) == {"a": "1", "b": ["1", ("1",), 3], "c": "the env:A", "d": "env:", "e": "env:not a name", "f": None}
    assert json.dumps(value["a"]) == '"env:A"'
