"""What the coordinator refuses and reports, and the order in which it does things, on plain numbers."""

from collections import Counter
from types import SimpleNamespace

import pytest

from actors.coordinator import Coordinator, _phases, rate, stage_event, stage_name
from actors.publisher import Published
from pipelines.counts import EpisodeCounts, StageCounts
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import AlgorithmConfig, Config, EnvironmentConfig, RunConfig, SamplingConfig
from rtpo_ray.errors import ConservationError, WeightSyncError
from rtpo_ray.types import UpdateResult

STAGE = Stage(turn=1, n_siblings=4)
EPISODES = EpisodeCounts(episodes=5, boundaries=Counter({0: 5, 1: 3}))


def check(stage=STAGE, name="rtpo", **counts):
    made = Coordinator(config=Config(), algorithm=algorithms.make(name, {}), pool=None, gang=None, publisher=None)
    made._check(StageCounts(**counts), f"sweep 5, {stage_name(stage)}", stage, EPISODES)


def test_a_stage_that_adds_up_passes():
    check(siblings=12, trained=4, filtered=Counter(zero_advantage=4), failed=Counter({"E: x": 4}), versions=frozenset({0}))
    check(siblings=12, failed=Counter({"E: x": 12}))
    check(Stage(), "grpo", siblings=5, trained=3, filtered=Counter(zero_advantage=2))
    check(Stage(), "treegrpo", siblings=17, trained=17)  # how many grow is known block by block


@pytest.mark.parametrize("counts", [
    {"siblings": 11, "trained": 11}, {"siblings": 13, "trained": 13}, {"siblings": 12, "trained": 11}, {"siblings": 11, "trained": 12},
    {"siblings": 12, "trained": 8, "failed": Counter(x=5)}])
def test_lost_or_doubled_siblings_are_refused_with_the_numbers(counts):
    with pytest.raises(ConservationError, match=rf"sweep 5, turn 1: 3 boundaries x 4 siblings = 12 were asked for; {counts['siblings']} came back, "
                                                rf"{counts['trained']} trained"):
        check(**counts)


@pytest.mark.parametrize(("name", "counts"), [
    ("grpo", {"siblings": 4, "trained": 4}), ("grpo", {"siblings": 6, "trained": 6}), ("grpo", {"siblings": 5, "trained": 4}),
    ("treegrpo", {"siblings": 17, "trained": 16})])
def test_lost_or_doubled_episodes_are_refused_with_the_numbers(name, counts):
    with pytest.raises(ConservationError, match=rf"sweep 5, all turns: 5 episodes were asked for; {counts['siblings']} came back, "
                                                rf"{counts['trained']}"):
        check(Stage(), name, **counts)


def test_stale_samples_are_refused():
    with pytest.raises(WeightSyncError, match=r"sweep 5, turn 1: siblings were sampled by weight versions \[0, 3\]; expected only 0"):
        check(siblings=12, trained=12, versions=frozenset({3, 0}))


class Walk(Coordinator):
    """Writes down what it does; every stage generates 10 tokens, every batch of trunks 5, and each of `moves` says whether a stage learns."""

    def __init__(self, name="rtpo", args=None, max_turns=3, reached=(0, 1, 2), moves=(True,) * 9, **run):
        config = Config(run=RunConfig(**run), algorithm=AlgorithmConfig(name=name, args=args or {}), sampling=SamplingConfig(tasks_per_sweep=2),
                        environment=EnvironmentConfig(max_turns=max_turns))
        log = self.log = []
        gang = SimpleNamespace(save_checkpoint=lambda path: log.append(f"save {path}"), export=lambda path: log.append(f"export {path}"))
        super().__init__(config=config, algorithm=algorithms.build(config.algorithm), pool=None, gang=gang, publisher=None)
        self.reached, self.moves = reached, iter(moves)

    def evaluate(self, done, tokens):
        self.log.append(f"evaluate {done} after {tokens}")
        yield {"kind": "eval"}

    def _episodes(self, batch, name, ask):
        self.log.append(f"{len(batch)} x {ask.count} {name}{' with boundaries' if ask.keep_boundaries else ''}")
        return None, EpisodeCounts(episodes=2, generated_tokens=5, boundaries=Counter({turn: 2 for turn in self.reached})), 0.0

    def _stage(self, sweep, number, stage, trunks, episodes):
        self.log.append(stage_name(stage))
        self._unpublished = self._unpublished or next(self.moves)
        if self._unpublished and stage.publish:
            self._push()
        return {"kind": "stage", "generated_tokens": 10, "seconds": {}}

    def _publish(self, version):
        self.log.append(f"push v{version}")
        self._version = version
        return Published(version=version, hash="", members=(), probe_gap=0.0, seconds=0.5)

    def _retired(self):
        return {}

    def walk(self):
        """What happened between the first evaluation and the last."""
        kinds = [event["kind"] for event in self.run("/r")]
        assert kinds.count("sweep") == sum("trunks" in line for line in self.log) and self.log[-1] == "export /r/final"
        return [line for line in self.log[1:-2]]


def test_turns_are_walked_from_the_last_to_the_first_and_every_stage_that_learned_is_pushed():
    assert Walk(sweeps=1).walk() == ["2 x 1 trunks with boundaries", "turn 2", "push v1", "turn 1", "push v2", "turn 0", "push v3"]
    assert Walk(sweeps=1, moves=(False, True, False)).walk() == ["2 x 1 trunks with boundaries", "turn 2", "turn 1", "push v1", "turn 0"]


def test_a_turn_that_no_trunk_reached_is_skipped():
    assert Walk(sweeps=1, reached=(0,)).walk() == ["2 x 1 trunks with boundaries", "turn 0", "push v1"]


@pytest.mark.parametrize(("sync_every", "expected"), [
    (0, ["turn 2", "turn 1", "turn 0", "push v1"]), (2, ["turn 2", "turn 1", "push v1", "turn 0", "push v2"]),
    (3, ["turn 2", "turn 1", "turn 0", "push v1"])])
def test_generators_may_fall_behind_within_a_sweep_and_never_beyond(sync_every, expected):
    assert Walk(args={"sync_every": sync_every}, sweeps=1).walk()[1:] == expected


def test_a_push_that_was_due_at_a_skipped_turn_comes_at_the_end_of_the_sweep():
    assert Walk(args={"sync_every": 2}, sweeps=1, max_turns=4, reached=(0, 1, 3)).walk()[1:] == ["turn 3", "turn 1", "turn 0", "push v1"]


def test_a_method_without_branches_has_one_stage_on_its_trunks():
    assert Walk("grpo", {"n_trunks": 6}, sweeps=2).walk() == ["2 x 6 trunks", "all turns", "push v1", "2 x 6 trunks", "all turns", "push v2"]
    assert Walk("arpo", {"n_trunks": 2}, sweeps=1, reached=()).walk()[:2] == ["2 x 2 trunks with boundaries", "all turns"]


def evaluations(**run):
    made = Walk(**run)
    list(made.run("/r"))
    return [line for line in made.log if line.startswith("evaluate")], sum("trunks" in line for line in made.log)


def test_evaluations_by_sweeps_and_by_tokens():
    """A sweep of three stages generates 35 tokens."""
    assert evaluations(sweeps=3, eval_every=2) == (["evaluate 0 after 0", "evaluate 2 after 70", "evaluate 3 after 105"], 3)
    assert evaluations(sweeps=3, eval_every=0) == (["evaluate 0 after 0", "evaluate 3 after 105"], 3)
    by_tokens = ["evaluate 0 after 0", "evaluate 2 after 70", "evaluate 3 after 105"]
    assert evaluations(sweeps=3, eval_every=1, eval_every_tokens=50) == (by_tokens, 3)  # 35 crosses nothing, 70 crosses 50, 105 crosses 100


def test_a_budget_of_tokens_ends_the_run_after_the_sweep_that_spends_it():
    assert evaluations(sweeps=100, tokens=70, eval_every=0) == (["evaluate 0 after 0", "evaluate 2 after 70"], 2)
    assert evaluations(sweeps=100, tokens=71, eval_every=0) == (["evaluate 0 after 0", "evaluate 3 after 105"], 3)
    assert evaluations(sweeps=0, tokens=70) == (["evaluate 0 after 0"], 0)


def test_checkpoints_come_before_the_evaluation_of_their_sweep():
    made = Walk(sweeps=2, checkpoint_every=2, eval_every=1)
    list(made.run("/r"))
    assert made.log[-3:] == ["save /r/checkpoints/sweep-000002", "evaluate 2 after 70", "export /r/final"]


def test_rates_of_nothing_are_none():
    assert (rate(1, 4), rate(0, 4), rate(0, 0)) == (0.25, 0.0, None)


def test_phases_and_other_add_up_to_the_total():
    phases = _phases([{"generate": 1.0}, {"generate": 2.0, "credit": 0.5, "learn": 2.0, "broadcast": 1.0, "other": 9.0, "total": 9.0}], 7.0)
    assert phases == {"generate": 3.0, "credit": 0.5, "learn": 2.0, "broadcast": 1.0, "other": 1.0, "total": 7.0}


def update(**changes):
    fields = {name: 0 for name in UpdateResult.__slots__}
    return UpdateResult(**{**fields, "refused": "", **changes})


def test_the_event_of_a_stage():
    counts = StageCounts(groups=3, informative_groups=1, siblings=12, successes=9, trained=4, filtered=Counter(zero_advantage=8),
                         versions=frozenset({6}))
    published = Published(version=7, hash="ab", members=("g",), probe_gap=1e-6, seconds=1.0)
    event = stage_event(2, STAGE, counts, update(tokens=40, logprob_gap_max=0.5), published)
    assert (event["kind"], event["sweep"], event["turn"], event["success"], event["weight_version"]) == ("stage", 2, 1, 0.75, 6)
    assert event["zero_advantage_rate"] == pytest.approx(2 / 3)
    assert (event["trained"], event["filtered"], event["failed"]) == (4, {"zero_advantage": 8}, {})
    assert (event["weights_hash"], event["logprob_gap_max"]) == ("ab", 0.5)
    empty = stage_event(2, Stage(), StageCounts(), update(), None)
    rates = ("turn", "success", "zero_advantage_rate", "weight_version", "logprob_gap_max", "ratio_geomean", "weights_hash")
    assert [empty[name] for name in rates] == [None] * 7
