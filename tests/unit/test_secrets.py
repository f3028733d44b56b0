"""A secret is named in the configuration, read where it is used, and written down nowhere."""

import asyncio
import json

import pytest
from chats import chat
from worlds import Parrot, parrot_engine, settings

from actors.generator import Generator
from pipelines.collect import Ask
from pipelines.rows import tasks_to_table
from rtpo_ray import environments
from rtpo_ray.config import hash_config, load_config, to_yaml
from rtpo_ray.errors import ConfigError
from rtpo_ray.reports.tracker import Tracker
from rtpo_ray.secrets import conceal, reveal
from rtpo_ray.types import Task

WORLD = '''
from rtpo_ray.environments.base import Environment, Observation, Step

class Paid(Environment):
    def __init__(self, key: str = "", headers: dict = None):
        super().__init__()
        if len(key) < 8:
            raise ValueError(f"{key} is no key; expected at least 8 letters")
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
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="env:SEARCH_KEY: the environment variable SEARCH_KEY is not set"):
        load_config(None, overrides)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")  # as in a job: the nodes that play have it
    assert load_config(None, overrides).environment.path
    monkeypatch.delenv("RAY_ADDRESS")
    assert load_config(None, [*overrides, "cluster.address=elsewhere:1"]).environment.args["key"] == "env:SEARCH_KEY"


def test_a_constructor_that_refuses_it_does_not_show_it(overrides, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "hunter2")
    with pytest.raises(ConfigError, match="env:SEARCH_KEY is no key; expected at least 8 letters") as caught:
        load_config(None, overrides)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("interpolation", ["${oc.env:SEARCH_KEY}", "${ oc.env:SEARCH_KEY}", "${oc.env :SEARCH_KEY}"])
@pytest.mark.parametrize("how", ["override", "file"])
def test_what_omegaconf_would_write_down_is_refused(how, interpolation, monkeypatch, tmp_path):
    monkeypatch.setenv("SEARCH_KEY", SECRET)
    path = tmp_path / "mine.yaml"
    path.write_text(f"environment:\n  args:\n    key: {interpolation}\n")
    with pytest.raises(ConfigError, match=r"would write the variable's value into config\.yaml; name a secret as env:NAME") as caught:
        load_config(path if how == "file" else None, [] if how == "file" else [f"environment.args.key={interpolation}"])
    assert SECRET not in str(caught.value)


def test_only_whole_strings_name_a_variable(monkeypatch):
    monkeypatch.setenv("A", "1")
    value = {"a": "env:A", "b": ["env:A", ("env:A",), 3], "c": "the env:A", "d": "env:", "e": "env:not a name", "f": None}
    assert reveal(value) == {"a": "1", "b": ["1", ("1",), 3], "c": "the env:A", "d": "env:", "e": "env:not a name", "f": None}
    assert json.dumps(value["a"]) == '"env:A"'


def test_an_error_that_repeats_it_does_not_show_it(monkeypatch):
    class Refused(Parrot):
        def reset(self, seed):
            raise OSError(f"401 for https://search?key={SECRET}")

    monkeypatch.setenv("SEARCH_KEY", SECRET)
    made = Generator(name="g", make_engine=parrot_engine, make_environment=Refused, template=chat("chatml"), settings=settings(), overlong="error",
                     concurrency=1, conceal=lambda text: conceal(text, {"key": ["env:SEARCH_KEY"]}))
    table = asyncio.run(anext(made.episodes(tasks_to_table([Task(task_id="t", seed=0)]), Ask(seed=0, temperature=1.0))))
    assert table["failure"].to_pylist() == ["OSError: 401 for https://search?key=env:SEARCH_KEY"]


def test_an_attribute_that_is_named_unsaved_is_in_no_snapshot_and_in_no_hash():
    class Keyed(Parrot):
        unsaved = ("key", "ask")

        def __init__(self, key):
            super().__init__()
            self.key, self.ask = key, lambda: key

    one, two = Keyed(SECRET), Keyed("another")
    one.reset(3)
    two.restore(one.snapshot())
    assert two.word == one.word and (two.key, two.ask()) == ("another", "another") and two.state_hash() == one.state_hash()
    assert SECRET.encode() not in one.snapshot()
