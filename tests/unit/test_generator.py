"""The generator without Ray: tables in, tables out, and one broken rollout costs only itself."""

import asyncio
import json
import time
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from chats import chat
from worlds import Parrot, parrot_engine, settings

from actors.generator import Generator, _ranks
from actors.spawn import chat_template, episode_settings
from pipelines.branching import requests
from pipelines.collect import Ask
from pipelines.counts import count_episodes
from pipelines.credit import credit_groups
from pipelines.rows import GROUPS, REQUESTS, ROLLOUTS, groups_to_table, rollouts_to_table, table_to_groups, table_to_rollouts, tasks_to_table
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.algorithms.budget import is_extended
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

    def make(engine=None, world=Parrot, overlong="error", concurrency=100, slots=0, **changes):
        engine = engine or parrot_engine()
        made.append(Generator(name="g", make_engine=lambda: engine, make_environment=world, template=chat("chatml"), settings=settings(**changes),
                              overlong=overlong, concurrency=concurrency, slots=slots))
        return made[-1]

    yield make
    for one in made:
        one._loop.call_soon_threadsafe(one._loop.stop)


def ask(count=1, **changes):
    return Ask(**{"seed": 3, "temperature": 1.0, "count": count, **changes})


def episodes(made, tasks=TASKS, **options):
    return table_to_rollouts(pa.concat_tables([ROLLOUTS.empty_table(), *taken(made.episodes(tasks_to_table(tasks), ask(**options)))]))


def taken(parts):
    """What comes, one table after the other."""
    async def take():
        return [table async for table in parts]

    return asyncio.run(take())


def siblings(made, trunks, turn, count=1, **options):
    stage = Stage(turn=turn, n_siblings=count, baseline="boundary", with_trunk=False)
    wanted = requests(rollouts_to_table(trunks), stage, algorithms.make("rtpo", {}), seed=0)
    return table_to_groups(grown(made, wanted, **options))


def chunks(made, wanted, **options):
    return taken(made.siblings(wanted, ask(**options)))


def grown(made, wanted, **options):
    return pa.concat_tables(chunks(made, wanted, **options) or [GROUPS.empty_table()])


def test_episodes_come_in_the_order_of_tasks_and_trunks(generator):
    rollouts = episodes(generator(), count=2, keep_boundaries=True)
    assert [(one.rollout_id, one.task_id) for one in rollouts] == [(f"t{i}/{j}", f"t{i}") for i in range(5) for j in range(2)]
    assert [(one.end, one.returns_to_go, len(one.turns), len(one.boundaries)) for one in rollouts] == [("terminated", 1.0, 3, 3)] * 10
    assert {one.parent for one in rollouts} == {""}
    assert all(one.turns[0].context_ids == two.turns[0].context_ids for one, two in zip(rollouts[::2], rollouts[1::2], strict=True))
    assert len({turn.seed for one in rollouts for turn in one.turns}) == 30


def test_episodes_of_so_many_tasks_come_together(generator):
    parts = taken(generator().episodes(tasks_to_table(TASKS), ask(count=2, chunk=2)))
    assert [[one.rollout_id for one in table_to_rollouts(part)] for part in parts] == [
        [f"t{i}/{j}" for i in some for j in range(2)] for some in ((0, 1), (2, 3), (4,))]


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


def request(one, turn, count=2, **changes):
    """A REQUESTS row: `count` siblings of that trunk's boundary."""
    return {"group_id": f"{one.rollout_id}/{turn}", "task_id": one.task_id, "parent": one.rollout_id, "boundary": asdict(one.boundaries[turn]),
            "count": count, **changes}


def wanted(*rows):
    return pa.Table.from_pylist(list(rows), schema=REQUESTS)


class Held(ScriptedEngine):
    """Keeps requests whose seed is in `held` until `free`; at most `slots` at once are let in by the generator."""

    def __init__(self, held=(), **options):
        super().__init__(parrot_engine()._reply, **options)
        self.held, self.free, self.ended = set(held), asyncio.Event(), 0

    async def generate(self, context_ids, sampling):
        if sampling.seed in self.held:
            try:
                await self.free.wait()
            finally:
                self.ended += 1
        return await super().generate(context_ids, sampling)


def seed_of(rollout_id, turn):
    return derive_seed(derive_seed(3, rollout_id), turn)


@pytest.mark.parametrize(("chunk", "sizes"), [(0, [5]), (2, [2, 2, 1]), (1, [1] * 5), (9, [5])])
def test_groups_are_handed_on_in_chunks_in_the_order_of_the_requests(generator, chunk, sizes):
    trunks = episodes(generator(), keep_boundaries=True)
    rows = wanted(*(request(one, 1, expected_tokens=i) for i, one in enumerate(trunks)))
    tables = chunks(generator(), rows, chunk=chunk)
    assert [len(table) for table in tables] == sizes
    assert [row for table in tables for row in table["group_id"].to_pylist()] == [f"t{i}/0/1" for i in range(5)]
    assert pa.concat_tables(tables).equals(pa.concat_tables(chunks(generator(), rows)))


def test_a_chunk_waits_for_its_own_groups_and_for_those_before_it_alone(generator):
    """While the second of four groups is held, the first is handed on and the others are played to their end."""
    trunks = episodes(generator(), keep_boundaries=True)[:4]
    engine = Held({seed_of("t1/0/2/0", 2)})
    made = generator(engine)

    async def take():
        found, stream = [], made.siblings(wanted(*(request(one, 2, 1) for one in trunks)), ask(chunk=1))
        found.append((await anext(stream))["group_id"].to_pylist())
        while len(engine.requests) < 3:
            await asyncio.sleep(0.001)
        assert {sampling.seed for _, sampling in engine.requests} == {seed_of(f"t{i}/0/2/0", 2) for i in (0, 2, 3)}
        made._loop.call_soon_threadsafe(engine.free.set)
        return found + [table["group_id"].to_pylist() async for table in stream]

    assert asyncio.run(take()) == [["t0/0/2"], ["t1/0/2"], ["t2/0/2"], ["t3/0/2"]]


def test_whoever_takes_no_more_ends_the_rollouts_that_are_left(generator):
    trunks = episodes(generator(), keep_boundaries=True)[:2]
    engine = Held({seed_of("t1/0/2/0", 2)})
    made = generator(engine)

    async def take():
        stream = made.siblings(wanted(*(request(one, 2, 1) for one in trunks)), ask(chunk=1))
        await anext(stream)
        await stream.aclose()

    asyncio.run(asyncio.wait_for(take(), 10))
    asyncio.run(made.alive())  # one turn of its loop
    assert (engine.ended, engine._open, asyncio.run(made.take_occupancy())["slots"]) == (1, 0, 100)


def test_pilots_that_differ_are_followed_by_more_and_those_that_agree_with_the_chance_that_was_asked_for(generator):
    trunks = episodes(generator(), keep_boundaries=True)
    wrong = {seed_of("t0/0/2/1", 2), seed_of("t3/0/2/3", 2)}  # a pilot of the first group, and one of the fourth that comes after its pilots
    explore = 0.5
    rows = wanted(*(request(one, 2, 2, more=3, explore=explore) for one in trunks[:4]), request(trunks[4], 2, 2, more=0, explore=explore))
    groups = table_to_groups(grown(generator(parrot_engine(wrong=wrong.__contains__)), rows))
    followed = [is_extended([1.0, 1.0], explore, derive_seed(3, f"t{i}/0/2", "more")) for i in range(4)]
    assert set(followed[1:]) == {True, False}  # or the seed of this test shows nothing
    sizes = [5, *(5 if more else 2 for more in followed[1:]), 2]
    assert [(len(one.siblings), one.pilots, one.chance) for one in groups] == [
        (size, pilots, chance) for size, pilots, chance in zip(sizes, [2, 2, 2, 2, 0], [1.0, 0.5, 0.5, 0.5, 1.0], strict=True)]
    fixed = table_to_groups(grown(generator(parrot_engine(wrong=wrong.__contains__)), wanted(*(request(one, 2, 5) for one in trunks))))
    for one, other in zip(groups, fixed, strict=True):  # a sibling is the same rollout whether it was a pilot or not
        assert one.siblings == other.siblings[:len(one.siblings)]


def test_a_group_whose_pilots_agree_is_never_followed_without_a_chance_and_one_with_a_failed_pilot_never(generator):
    trunks = episodes(generator(), keep_boundaries=True)[:2]
    engine = parrot_engine(failures={2: EngineError("lost")})
    agree, failing = table_to_groups(grown(generator(engine), wanted(*(request(one, 2, 2, more=3, explore=0.0) for one in trunks))))
    assert (len(agree.siblings), agree.pilots, agree.chance) == (2, 2, 0.0)
    assert sorted(one.end for one in failing.siblings) == ["failed", "terminated"] and failing.pilots == 2


def test_the_longest_are_begun_first_and_who_has_begun_goes_on_first(generator):
    trunks = episodes(generator(), keep_boundaries=True)[:3]
    engine = parrot_engine()
    rows = wanted(*(request(one, 1, 2, expected_tokens=tokens) for one, tokens in zip(trunks, (5, 90, 30), strict=True)))
    groups = table_to_groups(grown(generator(engine, slots=1), rows))
    order = [f"{one}/1/{index}" for one in ("t1/0", "t2/0", "t0/0") for index in range(2)]
    assert [sampling.seed for _, sampling in engine.requests] == [seed_of(rollout, turn) for rollout in order for turn in (1, 2)]
    assert [one.group_id for one in groups] == ["t0/0/1", "t1/0/1", "t2/0/1"]
    assert {sibling.generator for one in groups for sibling in one.siblings} == {"g"}


def test_in_chunks_the_order_of_the_requests_stays_but_for_those_that_would_end_late(generator):
    trunks = episodes(generator(), keep_boundaries=True)
    engine = parrot_engine()
    rows = wanted(*(request(one, 2, 1, expected_tokens=tokens) for one, tokens in zip(trunks, (30, 30, 200, 30, 30), strict=True)))
    chunks(generator(engine, slots=1), rows, chunk=2)
    assert [sampling.seed for _, sampling in engine.requests] == [seed_of(f"t{i}/0/2/0", 2) for i in (2, 0, 1, 3, 4)]
    even = [{"expected_tokens": 30, "count": 1} for _ in range(10)]
    assert _ranks(even, slots=1, size=2) == [*((30.0 * place, place) for place in range(7)), *((210.0, place) for place in (7, 8, 9))]
    assert _ranks(even, slots=1, size=10) == [(-30.0, place) for place in range(10)]


def test_slots_bound_the_engine_and_not_the_episodes(generator):
    engine = Watched(parrot_engine()._reply)
    made = generator(engine, slots=2)
    assert len(episodes(made)) == 5 and engine.most == 2
    asyncio.run(made.take_occupancy())
    assert asyncio.run(made.take_occupancy()) == {"slots": 2, "slot_seconds": 0.0, "open_seconds": 0.0, "demand_seconds": 0.0}


def test_at_the_cutoff_rollouts_under_way_keep_their_turns_and_others_are_not_begun(generator):
    trunks = episodes(generator(), keep_boundaries=True)
    engine = Held({seed_of("t0/0/0/0", 1), seed_of("t2/0/0/0", 0)})
    made = generator(engine, concurrency=2)
    rows = wanted(*(request(one, 0, 1) for one in trunks))
    groups = table_to_groups(grown(made, rows, cutoff=time.time() + 1.5))
    found = {one.group_id: (one.siblings[0].end, len(one.siblings[0].turns)) for one in groups}
    assert found == {"t0/0/0": ("capped", 1), "t1/0/0": ("terminated", 3), "t2/0/0": ("capped", 0), "t3/0/0": ("capped", 0), "t4/0/0": ("capped", 0)}
    assert (engine.ended, engine._open) == (2, 0)  # their requests are gone
    (filtered,), (turn,) = credit_groups(groups_to_table(groups[:1]), algorithm=algorithms.make("rtpo", {})).to_pylist(), groups[0].siblings[0].turns
    assert (filtered["outcome"], filtered["reason"], filtered["generated_tokens"]) == ("filtered", "capped", len(turn.response_ids))


def test_a_capped_trunk_keeps_the_boundaries_of_its_turns(generator):
    engine = Held({seed_of("t0/0", 2)})
    trunk, other = episodes(generator(engine), tasks=TASKS[:2], keep_boundaries=True, cutoff=time.time() + 1.5)
    assert (trunk.end, [one.turn for one in trunk.turns], [one.turn for one in trunk.boundaries]) == ("capped", [0, 1], [0, 1])
    assert (other.end, len(other.boundaries)) == ("terminated", 3)
    assert count_episodes(rollouts_to_table([trunk, other])).ends == {"capped": 1, "terminated": 1}


def test_the_timeline_has_every_rollout_and_when_the_engine_was_busy(generator):
    made = generator()
    trunks = episodes(made, tasks=TASKS[:2], keep_boundaries=True)
    siblings(made, trunks, turn=2, count=1)
    spans = asyncio.run(made.take_spans())
    rollouts = [span for span in spans if span.lane == "rollouts"]
    assert sorted((span.name, span.details["rollout"], span.details["turns"]) for span in rollouts) == [
        ("sibling", "t0/0/2/0", 1), ("sibling", "t1/0/2/0", 1), ("trunk", "t0/0", 3), ("trunk", "t1/0", 3)]
    assert {(span.process, span.flight) for span in rollouts} == {("g", True)} and all(span.start <= span.end for span in spans)
    busy = [span for span in spans if span.lane == "engine"]
    assert busy and all(later.start >= earlier.end for earlier, later in zip(busy, busy[1:], strict=False))
    assert asyncio.run(made.take_spans()) == []
