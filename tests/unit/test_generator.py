"""The generator without Ray: tables in, tables out, and one broken rollout costs only itself."""

import asyncio
import json
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from chats import chat
from worlds import Parrot, parrot_engine, settings

from actors.generator import Generator
from actors.spawn import chat_template, episode_settings
from pipelines.branching import requests
from pipelines.collect import Ask
from pipelines.rows import GROUPS, REQUESTS, rollouts_to_table, table_to_groups, table_to_rollouts, tasks_to_table
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import Config, EnvironmentConfig, ModelConfig
from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import Observation
from rtpo_ray.errors import EngineError
from rtpo_ray.types import Task, context_hash, derive_seed

TASKS = [Task(task_id=f"t{i}", seed=i) for i in range(5)]


@pytest.fixture
def generator():
    """Makes generators, and ends their threads."""
    made = []

    def make(engine=None, world=Parrot, overlong="error", concurrency=100, **changes):
        engine = engine or parrot_engine()
        made.append(Generator(name="g", make_engine=lambda: engine, make_environment=world, template=chat("chatml"), settings=settings(**changes),
                              overlong=overlong, concurrency=concurrency))
        return made[-1]

    yield make
    for one in made:
        one._loop.call_soon_threadsafe(one._loop.stop)


def ask(count=1, **changes):
    return Ask(**{"seed": 3, "temperature": 1.0, "count": count, **changes})


def episodes(made, tasks=TASKS, **options):
    return table_to_rollouts(asyncio.run(made.episodes(tasks_to_table(tasks), ask(**options))))


def siblings(made, trunks, turn, count=1, **options):
    stage = Stage(turn=turn, n_siblings=count, baseline="boundary", with_trunk=False)
    wanted = requests(rollouts_to_table(trunks), stage, algorithms.make("rtpo", {}), seed=0)
    return table_to_groups(grown(made, wanted, **options))


def chunks(made, wanted, **options):
    """What `siblings` yields, one table after the other."""
    async def take():
        return [table async for table in made.siblings(wanted, ask(**options))]

    return asyncio.run(take())


def grown(made, wanted, **options):
    return pa.concat_tables(chunks(made, wanted, **options) or [GROUPS.empty_table()])


def test_episodes_come_in_the_order_of_tasks_and_trunks(generator):
    rollouts = episodes(generator(), count=2, keep_boundaries=True)
    assert [(one.rollout_id, one.task_id) for one in rollouts] == [(f"t{i}/{j}", f"t{i}") for i in range(5) for j in range(2)]
    assert [(one.end, one.returns_to_go, len(one.turns), len(one.boundaries)) for one in rollouts] == [("terminated", 1.0, 3, 3)] * 10
    assert {one.parent for one in rollouts} == {""}
    assert all(one.turns[0].context_ids == two.turns[0].context_ids for one, two in zip(rollouts[::2], rollouts[1::2], strict=True))
    assert len({turn.seed for one in rollouts for turn in one.turns}) == 30


def test_seeds_follow_ask_and_rollout_and_not_the_order_of_work(generator):
    one, other, again = episodes(generator()), episodes(generator(), seed=4), episodes(generator(concurrency=1), tasks=TASKS[::-1])
    assert one == again[::-1]
    assert [turn.seed for turn in one[0].turns] == [derive_seed(derive_seed(3, "t0/0"), k) for k in range(3)]
    assert not {turn.seed for rollout in one for turn in rollout.turns} & {turn.seed for rollout in other for turn in rollout.turns}


def test_siblings_start_from_the_boundary_and_are_continued_to_the_end(generator):
    trunks = episodes(generator(), keep_boundaries=True)
    made = generator(parrot_engine(wrong=lambda seed: seed % 3 == 0, weight_version=4))
    groups = siblings(made, trunks, turn=1, count=6)
    assert [(one.group_id, one.task_id, one.turn) for one in groups] == [(f"t{i}/0/1", f"t{i}", 1) for i in range(5)]
    for trunk, one in zip(trunks, groups, strict=True):
        assert [sibling.rollout_id for sibling in one.siblings] == [f"{one.group_id}/{j}" for j in range(6)]
        for sibling in one.siblings:
            assert [turn.turn for turn in sibling.turns] == [1, 2] and sibling.end == "terminated" and sibling.boundaries == ()
            first = sibling.turns[0]
            assert (first.context_ids, first.context_hash, first.state_hash) == (
                trunk.turns[1].context_ids, trunk.boundaries[1].context_hash, trunk.boundaries[1].state_hash)
            assert {turn.weight_version for turn in sibling.turns} == {4} and sibling.parent == trunk.rollout_id
            assert sibling.returns_to_go == float(all(turn.seed % 3 for turn in sibling.turns))
        assert len({turn.seed for sibling in one.siblings for turn in sibling.turns}) == 12
    assert {sibling.returns_to_go for one in groups for sibling in one.siblings} == {0.0, 1.0}


def test_every_boundary_gets_as_many_siblings_as_its_request_asks_for(generator):
    trunks = episodes(generator(), tasks=TASKS[:2], keep_boundaries=True)
    wanted = [(trunks[0], 0, 1), (trunks[0], 2, 3), (trunks[1], 1, 2)]
    table = pa.Table.from_pylist([
        {"group_id": f"{one.rollout_id}/{turn}", "task_id": one.task_id, "parent": one.rollout_id, "count": count,
         "boundary": asdict(one.boundaries[turn])}
        for one, turn, count in wanted], schema=REQUESTS)
    groups = table_to_groups(grown(generator(), table, count=99))
    assert [(one.group_id, one.task_id, one.turn, [sibling.rollout_id for sibling in one.siblings]) for one in groups] == [
        ("t0/0/0", "t0", 0, ["t0/0/0/0"]), ("t0/0/2", "t0", 2, ["t0/0/2/0", "t0/0/2/1", "t0/0/2/2"]), ("t1/0/1", "t1", 1, ["t1/0/1/0", "t1/0/1/1"])]
    assert [[[turn.turn for turn in sibling.turns] for sibling in one.siblings] for one in groups] == [[[0, 1, 2]], [[2]] * 3, [[1, 2]] * 2]
    assert [{sibling.parent for sibling in one.siblings} for one in groups] == [{"t0/0"}, {"t0/0"}, {"t1/0"}]


def test_an_engine_error_costs_one_rollout_and_keeps_its_message(generator):
    made = generator(parrot_engine(failures={1: EngineError("request 1 was lost")}))
    rollouts = episodes(made)
    good = ("terminated", "")
    assert [(one.end, one.failure) for one in rollouts] == [good, ("failed", "EngineError: request 1 was lost"), good, good, good]
    assert (rollouts[1].rollout_id, rollouts[1].task_id, rollouts[1].turns, rollouts[1].boundaries) == ("t1/0", "t1", (), ())


class Fragile(Parrot):
    def reset(self, seed):
        if seed == 2:
            raise ValueError("no room in the sandbox")
        return super().reset(seed)

    def step(self, response_text):
        if response_text == "x":
            raise KeyError("door")
        return super().step(response_text)


def test_an_environment_error_costs_one_rollout_and_keeps_its_message(generator):
    bad = derive_seed(derive_seed(3, "t4/0"), 1)
    rollouts = episodes(generator(parrot_engine(wrong=lambda seed: seed == bad), world=Fragile))
    assert [one.failure for one in rollouts] == ["", "", "ValueError: no room in the sandbox", "", "KeyError: 'door'"]
    assert [one.returns_to_go for one in rollouts] == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_one_failing_sibling_leaves_the_others_whole(generator):
    trunks = episodes(generator(), tasks=TASKS[:1], keep_boundaries=True)
    (one,) = siblings(generator(parrot_engine(failures={2: EngineError("lost")})), trunks, turn=2, count=4)
    assert [sibling.end for sibling in one.siblings] == ["terminated", "terminated", "failed", "terminated"]
    assert [sibling.returns_to_go for sibling in one.siblings] == [1.0, 1.0, 0.0, 1.0]


def test_a_boundary_that_does_not_restore_fails_its_group_with_the_reason(generator):
    trunks = episodes(generator(), tasks=TASKS[:1], keep_boundaries=True)
    forged = replace(trunks[0].boundaries[1], context_hash=context_hash([1]))
    (one,) = siblings(generator(), [replace(trunks[0], boundaries=(forged,))], turn=1, count=2)
    assert all(sibling.failure.startswith("ContextMismatch: turn 1: restored context has hash") for sibling in one.siblings)


@pytest.mark.parametrize(("overlong", "end", "failure"), [
    ("drop", "overlong", ""), ("error", "failed", r"ValueError: the first context leaves no room for a response in generators.max_model_len (5)")])
def test_an_overlong_first_context_is_an_error_or_dropped_as_configured(generator, overlong, end, failure):
    rollouts = episodes(generator(overlong=overlong, max_model_len=5), tasks=TASKS[:2])
    assert [(one.end, one.turns) for one in rollouts] == [(end, ())] * 2
    assert all(one.failure.startswith(failure) for one in rollouts) and bool(rollouts[0].failure) == bool(failure)


class Watched(ScriptedEngine):
    most = 0

    async def generate(self, context_ids, sampling):
        self.most = max(self.most, self._open + 1)
        return await super().generate(context_ids, sampling)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (2, 2), (100, 5)])
def test_concurrency_is_respected_and_used(generator, concurrency, most):
    engine = Watched(parrot_engine()._reply)
    assert len(episodes(generator(engine, concurrency=concurrency))) == 5
    assert engine.most == most


def test_no_rows_are_no_rows(generator):
    made = generator()
    assert episodes(made, tasks=[]) == [] and siblings(made, [], turn=0) == []


def test_a_probe_samples_with_its_own_seed_and_stops_nowhere(generator, monkeypatch):
    monkeypatch.setattr("actors.generator.ray.is_initialized", lambda: False)  # there may be a cluster, of other tests
    engine = ScriptedEngine(lambda context, sampling: [chat("chatml").tokenizer.eos_token_id, 7, 8])
    made = generator(engine)
    context = chat("chatml").encode("say red!")
    completion = asyncio.run(made.probe(context, 2, 0.9, 17))
    assert completion.token_ids == (chat("chatml").tokenizer.eos_token_id, 7)
    (_, sampling), = engine.requests
    assert (sampling.seed, sampling.max_tokens, sampling.stop_token_ids, sampling.temperature) == (17, 2, (), 0.9)
    assert asyncio.run(made.ready()) == "" and 0 <= asyncio.run(made.alive()) < 5 and repr(made) == "Generator(g)"


def test_an_engine_that_does_not_start_says_so():
    def broken():
        raise RuntimeError("no kernel for this CPU")

    with pytest.raises(RuntimeError, match="no kernel for this CPU"):
        Generator(name="g", make_engine=broken, make_environment=Parrot, template=chat("chatml"), settings=settings(),
                  overlong="error", concurrency=1)


@pytest.mark.parametrize(("ends", "stops"), [(None, ["<|im_end|>"]), ("<|im_start|>", ["<|im_end|>", "<|im_start|>"])])
def test_the_chat_template_is_used_as_configured_and_stops_where_the_generation_config_says(tmp_path, ends, stops):
    tokenizer = chat("chatml").tokenizer
    tokenizer.save_pretrained(tmp_path)
    if ends is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.convert_tokens_to_ids(ends)]}))
    config = Config(model=ModelConfig(path=str(tmp_path), tool_calls="llama3", template_args={"bos": 1}),
                    environment=EnvironmentConfig(tools_in="system", thoughts="strip", context="window"))
    made = chat_template(config, str(tmp_path))
    found = tokenizer.convert_ids_to_tokens(list(made.stop_ids))
    assert [one for one in found if one != "<|eot_id|>"] == stops  # that one is llama3's own
    assert (made.calls.name, made.opening("", [{"function": {"name": "f"}}], Observation("q"))[1]) == ("llama3", [])
    assert (episode_settings(config).thoughts, episode_settings(config).context) == ("strip", "window")
