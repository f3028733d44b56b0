"""The configuration: every mistake is named with its field, its value and what is valid."""

import dataclasses
from pathlib import Path

import pytest

from rtpo_ray import algorithms
from rtpo_ray.compare import load_comparison
from rtpo_ray.config import Config, check_resumable, describe, load_config, to_yaml, walk
from rtpo_ray.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True)
def local_cluster(monkeypatch):
    """Placement is checked against four CPUs, wherever the tests run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_defaults_are_valid_and_overrides_win_over_the_file(tmp_path):
    assert load_config(None) == Config()
    file = tmp_path / "a.yaml"
    file.write_text("algorithm: {args: {n_siblings: 4, n_trunks: 2}}\nrun: {name: from-file}\n")
    loaded = load_config(file, ["algorithm.args.n_siblings=6", "learner.lr=1e-4", "environment.args.hops=1"])
    assert (loaded.algorithm.name, loaded.algorithm.args, loaded.run.name) == ("rtpo", {"n_siblings": 6, "n_trunks": 2}, "from-file")
    assert (loaded.learner.lr, loaded.environment.args) == (1e-4, {"hops": 1})
    assert dataclasses.replace(loaded, algorithm=Config().algorithm, run=Config().run, learner=Config().learner,
                               environment=Config().environment) == Config()


@pytest.mark.parametrize(("override", "parts"), [
    ("algorithm.nam=rtpo", ["unknown field algorithm.nam ", "did you mean algorithm.name?", "args"]),
    ("algorithm.args.n_sibling=3", ["field algorithm.args.n_sibling is no option of rtpo ", "did you mean n_siblings?", "n_trunks",
                                   "clip_low", "epochs"]),
    ("algorithm.n_siblings=3", ["unknown field algorithm.n_siblings", "valid here: name, args"]),
    ("algorthm.name=grpo", ["unknown field algorthm ", "did you mean algorithm?", "learner", "weights"]),
    ("zzz=3", ["unknown field zzz;", "valid here: run, cluster, model"]),
    ("environment.args.hop=2", ["environment.args.hop", "'lookup'", "hops, entities, relations, replay"]),
])
def test_unknown_fields_name_the_valid_ones(override, parts):
    message = refused(override)
    assert [part for part in parts if part not in message] == [], message


def test_a_hint_is_given_only_when_one_is_close():
    assert "did you mean" not in refused("zzz=3")


@pytest.mark.parametrize(("override", "parts"), [
    ("algorithm.args.n_siblings=many", ["field algorithm.args.n_siblings is 'many'", "expected int"]),
    ("algorithm.args.n_siblings=2.5", ["field algorithm.args.n_siblings is 2.5", "expected int"]),
    ("algorithm.args.n_siblings=true", ["field algorithm.args.n_siblings is True", "expected int"]),
    ("algorithm.args.merge_groups=1", ["field algorithm.args.merge_groups is 1", "expected bool"]),
    ("algorithm.args.clip_low=tight", ["field algorithm.args.clip_low is 'tight'", "expected float"]),
    ("algorithm.args=3", ["field algorithm.args is 3", "expected dict"]),
    ("algorithm.name=[rtpo]", ["field algorithm.name is ['rtpo']", "expected str"]),
    ("learner.lr=fast", ["field learner.lr is 'fast'", "expected float"]),
    ("run.aim=perhaps", ["field run.aim is 'perhaps'", "expected bool"]),
    ("run.name=null", ["field run.name is None", "expected str"]),
    ("run.seed=[1]", ["field run.seed is [1]", "expected int"]),
    ("environment.args=3", ["field environment.args is 3", "expected dict"]),
    ("environment.args.hops=two", ["field environment.args.hops is 'two'", "expected int"]),
    ("environment.args.hops=1.5", ["field environment.args.hops is 1.5", "expected int"]),
    ("environment.args.replay=3", ["field environment.args.replay is 3", "expected bool"]),
    ("algorithm=3", ["algorithm is a section", "(3)", "name, args"]),
    ("run=null", ["run is a section", "(None)", "sweeps"]),
])
def test_wrong_types_name_field_value_and_type(override, parts):
    message = refused(override)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(("overrides", "parts"), [
    (["algorithm.args.n_siblings=1"], ["algorithm.args.n_siblings is 1", "at least 2", "advantage is always 0"]),
    (["algorithm.args.rho_min=2", "algorithm.args.sync_every=0"], ["algorithm.args.rho_min is 2", "rho_max is 1.0", "rho_min <= rho_max"]),
    (["algorithm.args.rho_max=2"], ["algorithm.args.rho_min is 1.0 and rho_max is 2 with sync_every 1", "set sync_every to 0"]),
    (["algorithm.name=grpo", "algorithm.args.n_siblings=4"], ["algorithm.args.n_siblings is no option of grpo", "n_trunks"]),
    (["algorithm.name=grpo", "algorithm.args.n_trunks=1"], ["algorithm.args.n_trunks is 1", "at least 2", "own baseline"]),
    (["algorithm.name=arpo", "algorithm.args.budget=4"], ["algorithm.args.budget is 4", "at least n_trunks (8)"]),
    (["algorithm.name=seeupo", "algorithm.args.update_order=up"], ["algorithm.args.update_order is 'up'", "reverse, natural, random"]),
    (["algorithm.name=ppo", "algorithm.args.lam=1.5"], ["algorithm.args.lam is 1.5", "at most 1"]),
    (["algorithm.name=nowhere.py:Mine"], ["field algorithm.name is 'nowhere.py:Mine'", "no file nowhere.py"]),
    (["environment.max_turns=0"], ["environment.max_turns is 0", "at least 1"]),
    (["learner.lr=0"], ["learner.lr is 0.0", "more than 0"]),
    (["learner.lr=nan"], ["learner.lr is nan", "finite"]),
    (["learner.lr=inf"], ["learner.lr is inf", "finite"]),
    (["learner.beta2=1"], ["learner.beta2 is 1.0", "[0, 1)"]),
    (["algorithm.args.clip_low=1"], ["algorithm.args.clip_low is 1", "less than 1"]),
    (["algorithm.args.dual_clip=0.5"], ["algorithm.args.dual_clip is 0.5", "0 (off) or more than 1"]),
    (["algorithm.args.tis_cap=0.1"], ["algorithm.args.tis_cap is 0.1", "0 (off) or at least 1"]),
    (["algorithm.args.sync_every=0", "algorithm.args.tis_cap=2"], ["algorithm.args.tis_cap is 2", "whoever sampled", "leave it at 0.0"]),
    (["algorithm.args.clip_low=.nan"], ["algorithm.args.clip_low is nan", "finite"]),
    (["algorithm.name=grpo2"], ["algorithm.name is 'grpo2'", "did you mean grpo?", "valid choices: rtpo, seeupo, grpo", "file.py:Class"]),
    (["environment.name=maze"], ["environment.name is 'maze'", "lookup"]),
    (["environment.context=merge"], ["environment.context is 'merge'", "append, template"]),
    (["sampling.overlong=cut"], ["sampling.overlong is 'cut'", "error, drop"]),
    (["model.dtype=int8"], ["model.dtype is 'int8'", "float32, bfloat16"]),
    (["warm_start.noise=1.1"], ["warm_start.noise is 1.1", "[0, 1]"]),
    (["warm_start.hidden=100"], ["warm_start.hidden is 100", "multiple of 32"]),
    (["generators.gpu_memory_utilization=1.5"], ["generators.gpu_memory_utilization is 1.5", "(0, 1]"]),
    (["run.name=a/b"], ["run.name is 'a/b'", "plain folder name"]),
    (["run.name=.hidden"], ["run.name is '.hidden'", "plain folder name"]),
    (["environment.args.hops=3", "environment.max_turns=3"], ["'hops': 3", "3 hops need 4 turns", "environment.max_turns is 3"]),
    (["environment.args.hops=0"], ["hops is 0", "at least 1"]),
    (["environment.args.entities=27"], ["entities is 27", "2 to 26"]),
    (["environment.args.relations=5"], ["relations is 5", "1 to 4"]),
    (["sampling.max_response_tokens=512"], ["sampling.max_response_tokens is 512", "generators.max_model_len (512)"]),
    (["learner.micro_batch_tokens=511"], ["learner.micro_batch_tokens is 511", "generators.max_model_len (512)"]),
    (["learner.gpus=1"], ["learner.gpus is 1 and generators.gpus is 0", "both above 0 or both 0"]),
    (["learner.cpus=0"], ["learner.cpus is 0", "learner.gpus"]),
    (["environment.args=[]"], ["environment.args is []", "expected dict"]),
    (["run=${learner}"], ["run is a section"]),
    (["environment=???"], ["environment is a section"]),
    (["run.name=\"a\\nb\""], ["run.name is", "plain folder name"]),
    (["weights.probe_tokens=512"], ["weights.probe_tokens is 512", "generators.max_model_len (512)"]),
    (["learner.ranks=4", "learner.cpus=1", "generators.cpus=1"],
     ["learner.ranks is 4", "generators.min is 1", "6 CPUs", "the local cluster's 4", "cluster.local_cpus"]),
    (["cluster.local_cpus=2", "generators.min=3", "learner.cpus=1", "generators.cpus=1"],
     ["generators.min is 3", "5 CPUs", "the local cluster's 2"]),
])
def test_impossible_values_name_field_value_and_what_is_valid(overrides, parts):
    message = refused(*overrides)
    assert [part for part in parts if part not in message] == [], message


METHOD = """
import sys
from dataclasses import dataclass
from rtpo_ray.algorithms.base import Algorithm, Objective, Stage, TurnOrder
from rtpo_ray.algorithms.credit import centred, own_turn, returns

@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm):
    branching = True

    def stages(self, max_turns):
        return [Stage(turn=0, n_siblings=2, baseline="boundary", with_trunk=False)]

    def credit(self, group):
        return own_turn(group, centred(returns(group)))
"""


@pytest.mark.parametrize(("before", "after", "parts"), [
    ("    branching = True\n", "", ["Mine.stages(3) names turn 0", "branching is False", "set branching = True"]),
    ("turn=0", "turn=3", ["Mine.stages(3) names turn 3; expected 0 to 2"]),
    ("n_siblings=2", "n_siblings=0", ["asks for 0 siblings of turn 0; expected at least 1"]),
    ("with_trunk=False", "n_siblings=1", ["SyntaxError"]),
    ('"boundary"', '"boundry"', ["Stage.baseline is 'boundry'; valid choices: task, boundary"]),
    ("return [Stage", "return []; [Stage", ["Mine.stages(3) returned []; expected a sequence of at least one Stage"]),
    ("return [Stage", "[Stage", ["Mine.stages(3) returned None"]),
    ("return [Stage", "raise KeyError('lost'); [Stage", ["KeyError: 'lost'"]),
    ("def credit", "def credits", ["Mine must define credit(group)"]),
    ("    def credit", "    objective = 3\n\n    def credit", ["Mine.objective is 3; expected an Objective"]),
    ("    def credit", "    objective = property(lambda self: Objective(loss='regresion'))\n\n    def credit",
     ["Objective.loss is 'regresion'; valid choices: clipped, regression"]),
    ("    def credit", "    objective = property(lambda self: Objective(turns=TurnOrder(order='reversed')))\n\n    def credit",
     ["TurnOrder.order is 'reversed'; valid choices: reverse, natural, random"]),
    ("    branching", "    beta: float\n    branching", ["field algorithm.args.beta is missing"]),
    ("    branching", "    def check(self, max_turns): 1 / 0\n    branching", ["field algorithm.args", "raised ZeroDivisionError"]),
    ("import sys", "import sys\nsys.exit('bye')", ["cannot be imported: SystemExit: bye"]),
])
def test_a_method_of_the_users_that_cannot_train_is_named_before_anything_starts(tmp_path, before, after, parts):
    assert METHOD.count(before) >= 1
    for number, text in enumerate((METHOD, METHOD.replace(before, after, 1))):
        (tmp_path / f"mine{number}.py").write_text(text)
    load_config(None, [f"algorithm.name={tmp_path}/mine0.py:Mine"])
    message = refused(f"algorithm.name={tmp_path}/mine1.py:Mine")
    assert message.startswith(("field algorithm.name is ", "field algorithm.args")), message
    assert [part for part in parts if part not in message] == [], message


def test_the_quickstart_takes_every_method():
    for name in algorithms.REGISTRY:
        load_config(CONF / "quickstart.yaml", [f"algorithm.name={name}"])


def test_a_resumed_run_may_change_how_it_computes_and_not_what_it_learns():
    before = load_config(None, ["run.name=a"])
    for free in ("run.sweeps=99", "learner.ranks=3", "cluster.local_cpus=32", "generators.min=4", "weights.timeout=9"):
        check_resumable(before, load_config(None, ["run.name=a", "cluster.local_cpus=16", free]))
    for fixed, field in (("learner.lr=1e-3", "learner.lr"), ("run.seed=1", "run.seed"), ("algorithm.args.n_siblings=4", "algorithm.args"),
                         ("sampling.temperature=0.5", "sampling.temperature"), ("environment.args.hops=1", "environment.args")):
        with pytest.raises(ConfigError, match=rf"field {field} is .* when the run began; a resumed run may change run\.name, "):
            check_resumable(before, load_config(None, ["run.name=a", fixed]))


@pytest.mark.parametrize("override", ["algorithm.args.n_siblings", "--fast", "algorithm.args.n_siblings=[1", "run.name=${nowhere}"])
def test_unreadable_overrides_are_configuration_errors(override):
    assert override.split("=")[0] in refused(override)


def test_placement_is_left_to_the_cluster_when_there_is_one(monkeypatch):
    assert load_config(None, ["cluster.address=auto", "learner.ranks=64", "learner.cpus=1"]).learner.ranks == 64
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert load_config(None, ["learner.ranks=64", "learner.cpus=1"]).learner.ranks == 64
    monkeypatch.delenv("RAY_ADDRESS")
    assert load_config(None, ["cluster.local_cpus=66", "learner.ranks=64", "learner.cpus=1"]).learner.ranks == 64


@pytest.mark.parametrize(("text", "part"), [
    ("run: {name: [}", "not valid YAML"), ("- a\n- b\n", "at the top level"), ("run: 3\n", "run is a section")])
def test_a_broken_file_is_named(tmp_path, text, part):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "broken.yaml" in str(caught.value) and part in str(caught.value)


def test_a_missing_file_is_named_with_the_existing_ones(monkeypatch):
    monkeypatch.chdir(CONF.parent)
    with pytest.raises(ConfigError, match=r"'conf/fast.yaml' does not exist.*conf/quickstart\.yaml"):
        load_config("conf/fast.yaml")


@pytest.mark.parametrize("overrides", [[], ["run.name=x-1", "learner.lr=3e-5", "environment.args={hops: 1, replay: true}", "model.path='~/a b: c'",
                                        "algorithm.name=seeupo", "algorithm.args={carry: geometric, carry_clip: 0.2, n_trunks: 3}"]])
def test_yaml_round_trip(tmp_path, overrides):
    config = load_config(None, overrides)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("file", sorted(file for file in CONF.rglob("*.yaml") if file.parent.name not in ("cluster", "simulate")),
                         ids=lambda file: file.stem)
def test_every_file_of_conf_loads_and_overrides_something(file):
    if file.parent.name == "compare":
        assert len(load_comparison(file, ["cluster.local_cpus=1024"]).runs) > 1
    else:
        elsewhere = ["cluster.address=elsewhere"]  # whose nodes have the files that it names
        assert load_config(file, elsewhere, learn=file.parent.name != "benchmarks") != load_config(None, elsewhere)


def test_help_does_not_depend_on_the_machine(monkeypatch):
    everywhere = describe()
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert describe() == everywhere
    assert "do not fit the local cluster's 1" in refused("run.seed=1")


def test_every_field_is_documented_and_described():
    text = describe()
    for name, value, spec in walk(Config()):
        assert len(spec.metadata["doc"]) > 5, name
        assert f"  {name}={value if value != '' else chr(34) * 2}\n      {spec.metadata['doc']}" in text
    assert "(append | template | window | summary)" in text


def test_the_options_of_every_method_are_described_once():
    text = describe()
    shared = text.index("algorithm.args of every method:")
    places = [text.index(f"\nalgorithm.args of {name}:") for name in algorithms.REGISTRY]
    assert sorted(places) == places and shared < places[0]
    sections = dict(zip(algorithms.REGISTRY, (text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)), strict=True))
    for name, cls in algorithms.REGISTRY.items():
        for spec in dataclasses.fields(cls):
            option = f"  {spec.name}={spec.default}\n      {spec.metadata['doc']}"
            assert (option in sections[name]) != (option in text[shared:places[0]]), (name, spec.name)
    assert "n_siblings=8" in sections["rtpo"] and "n_siblings" not in sections["grpo"] and "clip_high=0.28" in sections["dapo"]
    assert "(reverse | natural | random)" in sections["seeupo"]


@pytest.mark.parametrize(("overrides", "parts"), [
    (["environment.thoughts=strip"], ["field environment.thoughts is 'strip'", "environment.context is 'append'", "environment.context=template"]),
    (["model.path=m", "model.template_args.tools=1"], ["field model.template_args.tools is set by the run"]),
    (["model.tool_calls=llama3"], ["field model.tool_calls is 'llama3'", "model.path is empty", "set model.path"]),
    (["environment.tools_in=system"], ["environment.tools_in is 'system'", "model.path is empty"]),
    (["model.path=m", "model.tool_calls=json"], ["field model.tool_calls is 'json'", "valid choices: auto, harmony, mistral", "hermes, llama3"]),
])
def test_what_the_chat_template_is_asked_for_must_fit(overrides, parts):
    message = refused(*overrides)
    assert [part for part in parts if part not in message] == [], message


def test_the_chat_template_of_a_model_can_be_chosen():
    loaded = load_config(None, ["model.path=m", "model.tool_calls=llama3", "model.template_args={enable_thinking: false}",
                                "environment.tools_in=system", "environment.context=window", "environment.thoughts=strip"])
    assert (loaded.model.tool_calls, loaded.model.template_args) == ("llama3", {"enable_thinking": False})
    assert (loaded.environment.tools_in, loaded.environment.thoughts) == ("system", "strip")
