"""The simulation against times that can be worked out by hand, and its fit against a run that it made itself."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rtpo_ray import cli
from rtpo_ray.algorithms.grpo import Grpo
from rtpo_ray.algorithms.rtpo import Rtpo
from rtpo_ray.algorithms.treegrpo import TreeGrpo
from rtpo_ray.config import load_config, to_yaml
from rtpo_ray.errors import ConfigError
from rtpo_ray.simulation import report
from rtpo_ray.simulation.events import Job, Stage
from rtpo_ray.simulation.fit import FREE, fit
from rtpo_ray.simulation.model import Drawn, Machine, Returns, Turn, Work, load_machine
from rtpo_ray.simulation.sweep import Shape, simulate

FREE_OF_CHARGE = Machine(slots=8, step=1.0, sequence=0.0, prefill=0.0, turn=0.0, cache_block=4, learner_token=0.0)
H200 = Path(__file__).parents[2] / "conf/simulate/h200.yaml"


def once(*responses, context=1, seconds=0.0):
    """An episode whose turns have these responses."""
    return tuple(Turn(context, response, seconds) for response in responses)


def run(blocks, *, generators=1, ranks=1, overlap=False, **changes):
    return Stage([[Job([(episode, 0) for episode in job], tokens) for job, tokens in block] for block in blocks],
                 replace(FREE_OF_CHARGE, **changes), generators, ranks, overlap).run()


def test_responses_share_the_steps_of_an_engine():
    """3, 5 and 5 tokens: 3 steps of 1 + 3 x 0.5 seconds, then 2 of 1 + 2 x 0.5."""
    assert run([[([once(3), once(5), once(5)], 0)]], sequence=0.5).generate == pytest.approx(3 * 2.5 + 2 * 2.0)


def test_those_that_wait_take_free_slots_at_once():
    """Two slots: 2 and 6 tokens begin, then 3 more at step 2; all is over at step 6, with one slot idle for the last of them."""
    times = run([[([once(2), once(6), once(3)], 0)]], slots=2)
    assert times.generate == pytest.approx(6.0) and times.generator_busy == pytest.approx(6.0)


def test_a_turn_waits_for_its_environment_and_for_nobody_elses():
    """4 tokens, 10 seconds outside, 4 tokens; the other one's 20 tokens go on meanwhile."""
    assert run([[([once(4, 4, seconds=10.0)], 0)]]).generate == pytest.approx(18.0)
    assert run([[([once(4, 4, seconds=10.0), once(20)], 0)]]).generate == pytest.approx(20.0)


def test_prefill_pays_what_is_not_cached_in_whole_blocks():
    """Blocks of 4. Siblings of a context of 10: the first pays 10, the other 10 - 8. A next turn with 10 + 3 = 13 known of 20 pays 20 - 12."""
    assert run([[([once(1, context=10), once(1, context=10)], 0)]], prefill=1.0).generate == pytest.approx(12 + 1)
    assert run([[([(Turn(10, 3), Turn(20, 1))], 0)]], prefill=1.0).generate == pytest.approx(10 + 3 + 8 + 1)


def test_busy_threads_share_the_cores():
    """Three engines on two cores: 4 tokens each take 1.5 times as long until the first is done, and there is room for two."""
    blocks = [[([once(4)], 0)], [([once(8)], 0)], [([once(8)], 0)]]
    assert run(blocks, generators=3).generate == pytest.approx(8.0)
    assert run(blocks, generators=3, cores=2).generate == pytest.approx(4 * 1.5 + 4)
    assert run(blocks, generators=3, cores=2, crowding=1.2).generate == pytest.approx((4 * 1.5 + 4) * 1.2)
    assert Machine(cores=3, crowding=1.5).slowdown(2) == pytest.approx(1.25) and Machine(cores=3, crowding=1.5).slowdown(1) == 1.0


def test_a_block_goes_to_the_least_loaded_generator():
    blocks = [[([once(10)] * 8, 0)], [([once(2)] * 8, 0)], [([once(3)] * 8, 0)], [([once(1)] * 8, 0)]]
    times = run(blocks, generators=2, slots=8)  # 10 | 2; of the two that are left each gets one (16 rollouts at most): 10 + 3 | 2 + 1
    assert times.generate == pytest.approx(13.0) and times.generator_busy == pytest.approx(16.0)


def test_the_coordinator_hands_out_one_block_after_the_other():
    assert run([[([once(2)], 0)], [([once(2)], 0)]], generators=2, block=5.0).generate == pytest.approx(7.0)


@pytest.mark.parametrize(("changes", "overlap", "learn", "busy"), [
    ({}, False, 9.0, 9.0),  # 6 + 3 positions after the 10 steps
    ({}, True, 3.0, 9.0),  # 6 from step 2 to step 8, 3 afterwards
    ({"chunk": 2}, True, 9.0, 9.0),  # both at once, when the second is complete
    ({"cores": 1}, True, 3.0, 15.0),  # engine and learner share a core: 6 positions take 12 seconds, and 3 are left when all is sampled
])
def test_the_learner_takes_what_is_complete(changes, overlap, learn, busy):
    times = run([[([once(2)], 6.0), ([once(10)], 3.0)]], overlap=overlap, learner_token=1.0, **{"chunk": 1} | changes)
    assert (times.learn, times.learner_busy) == (pytest.approx(learn), pytest.approx(busy))


def test_chunks_are_handed_on_in_order_when_they_must_be():
    """The second is complete at 2, the first at 10."""
    blocks = [[([once(10)], 3.0), ([once(2)], 6.0)]]
    assert run(blocks, overlap=True, learner_token=1.0, chunk=1).learn == pytest.approx(9.0)
    assert run(blocks, overlap=True, learner_token=1.0, chunk=1, ordered=False).learn == pytest.approx(3.0)


def test_learner_ranks_share_the_positions():
    assert run([[([once(2)], 8.0)]], ranks=4, learner_token=1.0, learner_scaling=0.5).learn == pytest.approx(4.0)


def test_a_push_goes_down_a_binary_tree_in_buckets():
    """16 bytes in buckets of 4 at 2 bytes a second: 8 s to one generator; to 7 generators three levels, so two buckets more."""
    machine = Machine(push=1.0, push_receiver=0.5, weight_bytes=16, bucket_bytes=4, bandwidth=2.0)
    assert machine.push_seconds(1) == pytest.approx(1 + 0.5 + 8) and machine.push_seconds(7) == pytest.approx(1 + 3.5 + 8 + 4)


def test_equal_returns_of_a_beta_distribution():
    """Uniform p: E[p^n + (1 - p)^n] = 2 / (n + 1). Far apart: always. Alike: p^n + (1 - p)^n."""
    uniform = Returns(0.5, 2.0)
    assert uniform.equal(3) == pytest.approx(0.5) and uniform.equal(9) == pytest.approx(0.2)
    assert Returns(0.1, 1e8).equal(2) == pytest.approx(0.82, abs=1e-6) and Returns(0.1, 1e-5).equal(8) == pytest.approx(1.0, abs=1e-4)
    assert Returns.of(0.5, 2 / 9, 8).equal(3) == pytest.approx(0.5) and Returns(0.0, 1.0).equal(8) == Returns(1.0, 1.0).equal(8) == 1.0


WORK = Work(tasks=4, turns=2, episodes=(once(3, context=10), (Turn(10, 5), Turn(20, 2))), returns=(Returns(0.5, 2.0),) * 2, padding=1.5)


def test_a_sweep_of_rtpo_by_hand():
    """Half of the trunks end after turn 0 (3 tokens), half go on (5 + 2). Turn 1: 2 boundaries x 3 siblings x 2 tokens. Turn 0: 4 x 3 siblings,
    half of them 3 tokens, half 7. One in two groups of 3 has equal returns."""
    sweep = simulate(Rtpo(n_siblings=3), WORK, replace(FREE_OF_CHARGE, slots=64, stage=1.0, sweep=5.0, push=0.25, update=0.5, learner_token=0.1),
                     Shape(generators=1, ranks=1))
    trunks, last, first = sweep.parts
    assert [part.turn for part in sweep.parts] == [-1, 1, 0] and [part.rollouts for part in sweep.parts] == [4, 6, 12]
    assert [part.generated_tokens for part in sweep.parts] == [2 * 3 + 2 * 7, 6 * 2, 6 * 3 + 6 * 7]
    assert [part.generate for part in sweep.parts] == [pytest.approx(7), pytest.approx(2), pytest.approx(7)]
    assert last.trained_tokens == pytest.approx(6 * 2 / 2) and first.trained_tokens == pytest.approx((6 * 3 + 6 * 5) / 2)
    assert last.learner_tokens == pytest.approx(1.5 * 6 * 22 / 2) and first.learner_tokens == pytest.approx(1.5 * (6 * 13 + 6 * 15) / 2)
    assert last.learn == pytest.approx(9.9 + 0.5) and trunks.learn == trunks.push == 0.0
    assert sweep.siblings == 18 and sweep.seconds == pytest.approx(16 + 9.9 + 12.6 + 2 * 0.75 + 3 * 1.0 + 5.0)
    assert sweep.generators_busy == pytest.approx(16 / sweep.seconds) and sweep.learners_busy == pytest.approx(23.5 / sweep.seconds)


def test_shared_prefixes_are_computed_once_a_group():
    """Turn 1: 2 groups of 3 x (20 + 2) positions; the context of 20 is common to all three."""
    sweep = simulate(Rtpo(n_siblings=3), replace(WORK, shared=True), FREE_OF_CHARGE, Shape(generators=1, ranks=1))
    assert sweep.parts[1].learner_tokens == pytest.approx(1.5 * 2 * (20 + 6) / 2)


def test_grpo_learns_its_trunks():
    """4 tasks x 4 chains; a sequence of a rollout holds all of its turns: 13 or 22 positions. E[equal] of 4 is 2 / 5."""
    machine = replace(FREE_OF_CHARGE, slots=64, learner_token=0.01, rollout=0.5)
    after, meanwhile = (simulate(Grpo(n_trunks=4), WORK, machine, Shape(generators=1, ranks=1, overlap=overlap)) for overlap in (False, True))
    assert [part.turn for part in after.parts] == [-1, None] and [part.turn for part in meanwhile.parts] == [None]
    assert after.sum("learner_tokens") == meanwhile.sum("learner_tokens") == pytest.approx(1.5 * 0.6 * (8 * 13 + 8 * 22))
    assert after.sum("generated_tokens") == meanwhile.sum("generated_tokens") == 8 * 3 + 8 * 7
    assert after.siblings == meanwhile.siblings == 16 and after.sum("other") == pytest.approx(16 * 0.5) and meanwhile.sum("other") == 0.0


def test_a_method_whose_branches_are_not_known_before_is_refused():
    with pytest.raises(ConfigError, match="TreeGrpo branches where its trunks decide"):
        simulate(TreeGrpo(), WORK, FREE_OF_CHARGE, Shape(generators=1, ranks=1))


def test_the_same_seed_gives_the_same_sweep_and_another_one_another():
    work = Drawn(tasks=16, environment_seconds=0.5).work(1)
    times = [simulate(Rtpo(), work, Machine(), Shape(generators=3, ranks=1), seed).seconds for seed in (0, 0, 1)]
    assert times[0] == times[1] != times[2]


def test_drawn_episodes_are_as_described():
    work = Drawn(turns=3, go_on=0.5, prompt_tokens=100, response_tokens=50, response_spread=0.5, observation_tokens=7, max_response_tokens=10_000
                 ).work(0, 20_000)
    share = [sum(len(e) >= turns for e in work.episodes) / 20_000 for turns in (1, 2, 3, 4)]
    assert share == pytest.approx([1, 0.5, 0.25, 0], abs=0.01)
    responses = [turn.response for e in work.episodes for turn in e]
    mean = sum(responses) / len(responses)
    assert mean == pytest.approx(50, rel=0.02)
    assert (sum((r - mean)**2 for r in responses) / len(responses))**0.5 == pytest.approx(25, rel=0.05)
    two = next(e for e in work.episodes if len(e) > 1)
    assert two[0].context == 100 and two[1].context == 107 + two[0].response
    taken = work.take(10, 1, random.Random(0))
    assert all(len(e) > 1 for e in taken) and len(taken) == 10


# --- a run

HIDDEN = Machine(slots=64, cache_block=32, cores=2, step=5e-3, sequence=2e-4, turn=4e-4, learner_token=6e-5, prefill=2e-5, update=0.05, push=0.1,
                 stage=0.08, sweep=0.2)


def write_run(folder, machine, sweeps=3):
    """metrics.jsonl and config.yaml of a run on `machine`, as if the simulation were one; its first sweep is far slower."""
    config = load_config(None, ["environment.max_turns=3", "sampling.tasks_per_sweep=32", "generators.min=1", "generators.max_num_seqs=64",
                                "cluster.address=elsewhere", "algorithm.args.n_siblings=4"])
    (folder / "config.yaml").write_text(to_yaml(config))
    work = Drawn(tasks=32, turns=3, prompt_tokens=60, response_tokens=12, response_spread=0.5, observation_tokens=6, padding=1.2).work(5)
    sweep = simulate(Rtpo(n_siblings=4), work, machine, Shape(generators=1, ranks=1), 5)
    events = []
    for number in range(sweeps):
        slow = 1.0 if number else 9.0
        trunks, *stages = sweep.parts
        seconds = dict.fromkeys(("generate", "learn", "broadcast", "other", "total"), 0.0)
        for part in stages:
            mine = {"generate": part.generate, "learn": part.learn, "broadcast": part.push, "other": part.other, "total": part.total}
            reached = [trunk[part.turn] for trunk in work.episodes if len(trunk) > part.turn]
            later = [[t.context for t in e[part.turn:]] for e in work.episodes if len(e) > part.turn]
            events.append({"kind": "stage", "sweep": number, "turn": part.turn, "groups": part.rollouts // 4, "siblings": part.rollouts,
                           "success": 0.3, "zero_advantage_rate": work.returns[0].equal(4), "generated_tokens": part.generated_tokens,
                           "prompt_tokens": sum(map(sum, later)) / len(reached) * part.rollouts, "learner_tokens": part.learner_tokens,
                           "optimizer_steps": 1, "seconds": {name: slow * value for name, value in mine.items()}})
            seconds = {name: seconds[name] + slow * mine[name] for name in seconds}
        seconds["generate"] += slow * trunks.generate
        seconds["total"] += slow * (trunks.total + sweep.outside)
        events.append({"kind": "sweep", "sweep": number, "tasks": 32, "trunk_turns_mean": 2.44, "seconds": seconds})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return work, sweep


def test_a_fit_finds_the_machine_that_made_the_run(tmp_path, monkeypatch):
    """From sums alone, lengths drawn anew: the sweep itself within 3 %, and one on three generators that share two cores within 10 %."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    work, sweep = write_run(tmp_path, HIDDEN)
    found = fit(tmp_path)
    assert found.measured == pytest.approx(sweep.seconds) and abs(found.error) < 0.03
    assert found.work.padding == pytest.approx(1.2, rel=0.05) and not found.work.shared
    assert {name: getattr(found.machine, name) for name in ("push", "stage", "cores", "slots")} == {
        "push": pytest.approx(0.1), "stage": pytest.approx(0.08), "cores": 2, "slots": 64}
    assert found.machine.learner_token == pytest.approx(HIDDEN.learner_token, rel=0.15)
    shape = Shape(generators=3, ranks=1)
    for method in (Rtpo(n_siblings=4), Grpo(n_trunks=12)):
        expected = simulate(method, work, HIDDEN, shape, 5).seconds
        assert simulate(method, found.work, found.machine, shape).seconds == pytest.approx(expected, rel=0.1)
    assert all(getattr(found.machine, name) > 0 for name in FREE)


@pytest.mark.parametrize(("lines", "message"), [(None, "holds no metrics.jsonl"), ("", "holds no whole sweep")])
def test_a_folder_that_is_no_run_is_refused(tmp_path, lines, message):
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path)


# --- what is shown


@pytest.mark.parametrize(("text", "message"), [
    ("machine: {steps: 1}", "machine: unknown field steps; valid here: slots, step"), ("machines: {}", "unknown section machines"),
    ("machine: {step: fast}", "field step is 'fast'; expected float"), ("work: {go_on: 1.5}", "field go_on is 1.5; expected at most 1")])
def test_a_wrong_file_is_named(tmp_path, text, message):
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_machine(file)


def small(trunks=None):
    what = report.scene("", str(H200), trunks=trunks, siblings=4, shared=None, seed=0)
    return replace(what, work=replace(what.work, tasks=16), machine=replace(what.machine, chunk=1))


def test_methods_are_compared_at_equal_tokens():
    what = small()
    one = Shape(generators=1, ranks=2)
    ours, generated, trained = (simulate(method, what.work, what.machine, one) for method in (what.rtpo, what.generated, what.trained))
    assert generated.sum("generated_tokens") == pytest.approx(ours.sum("generated_tokens"), rel=0.1)
    assert trained.sum("trained_tokens") == pytest.approx(ours.sum("trained_tokens"), rel=0.15)  # whole chains, of which few are needed
    found = report.rows(what, [1], [2], 0)
    assert [(row["method"], row["overlap"]) for row in found] == [("rtpo", False), ("grpo", False), ("rtpo", True), ("grpo", True)]
    per_token = [row["seconds"] / row["generated_tokens"] for row in found]
    assert found[0]["grpo"]["generated"] == pytest.approx(per_token[0] / per_token[1])
    assert found[2]["seconds"] < found[0]["seconds"] and sum(found[0]["phases"].values()) == pytest.approx(found[0]["seconds"])


def test_the_best_split_is_the_fastest_of_all_shares():
    what = small()
    seconds = {ranks: simulate(what.rtpo, what.work, what.machine, Shape(generators=16 - ranks, ranks=ranks)).seconds
               for ranks in (2, 4, 6, 8, 10, 12)}
    best = report.best_split(what.rtpo, what.work, what.machine, 16, False)
    assert best.seconds == min(seconds.values()) == seconds[best.shape.ranks] and best.shape.generators + best.shape.ranks == 16
    alone = report.best_split(what.rtpo, what.work, what.machine, 3, False)  # two ranks at least hold the model
    assert (alone.shape.generators, alone.shape.ranks) == (1, 2) and alone.seconds > best.seconds


def test_the_command_prints_a_table_json_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "GPUS", (4, 8))
    file = tmp_path / "machine.yaml"
    file.write_text("machine: {step: 0.01}\nwork: {tasks: 4}\n")
    base = ["simulate", "--machine", str(file), "--generators", "1,2", "--learners", "1"]
    assert cli.main(base) == 0
    table = capsys.readouterr().out
    assert table.count("| rtpo | o") == 4 and "RTPO's seconds a token over GRPO's" in table and f"as {file} says" in table
    assert "| turn 2 |" not in table
    assert cli.main(["simulate", "--machine", str(file), "--generators", "1", "--learners", "1"]) == 0
    parts = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.count(" | ") == 10][1:]
    assert [line[2] for line in parts] == ["trunks", "turn 2", "turn 1", "turn 0", "trunks", "all turns", "trunks", "turn 2", "turn 1", "turn 0",
                                           "all turns"]
    assert float(parts[1][4]) == pytest.approx(sum(map(float, parts[1][5:9])), abs=0.03)
    assert cli.main([*base, "--json", "--figure", str(tmp_path / "out.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["sweeps"]) == 8 and found["machine"]["step"] == 0.01
    assert [point["gpus"] for point in found["scaling"]] == [4, 8] * 4
    assert "Simulated: 4 tasks a sweep" in (tmp_path / "out.svg").read_text()  # matplotlib says each text in a comment
    assert cli.main(["simulate", "--machine", str(tmp_path / "none.yaml")]) == 2
