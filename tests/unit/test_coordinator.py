"""What the coordinator refuses and reports, and the order in which it does things, on plain numbers."""

import atexit
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.coordinator import Coordinator, Trunks
from actors.events import phases, stage_event, stage_name
from actors.publisher import Published
from pipelines.counts import EpisodeCounts, StageCounts
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import AlgorithmConfig, Config, EnvironmentConfig, RunConfig, SamplingConfig
from rtpo_ray.errors import CheckpointError, ConservationError, DataError, LearnerLost, RtpoError, WeightSyncError
from rtpo_ray.ledger import Ledger, trunks_folder
from rtpo_ray.reports.scores import rate
from rtpo_ray.types import Task, UpdateResult

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


def test_pilots_may_stay_alone_or_be_followed_by_all_of_the_others():
    adaptive = Stage(turn=1, n_siblings=4, pilots=2, explore=0.5, with_trunk=False)
    for siblings in (6, 8, 12):
        check(adaptive, siblings=siblings, trained=siblings)
    for siblings in (5, 13):
        with pytest.raises(ConservationError, match=f"3 boundaries x 2 to 4 siblings = 6 to 12 were asked for; {siblings} came back"):
            check(adaptive, siblings=siblings, trained=siblings)


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


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """Trunks that are read back are those of the fake that made them: none."""
    monkeypatch.setattr("actors.coordinator.read_episodes", lambda folder, home: None)


def played(counts):
    return Trunks(episodes=None, counts=counts, seconds={})


class Walk(Coordinator):
    """Writes down what it does; every stage generates 10 tokens, every batch of trunks 5, and each of `moves` says whether a stage learns."""

    def __init__(self, name="rtpo", args=None, max_turns=3, reached=(0, 1, 2), moves=(True,) * 9, **run):
        config = Config(run=RunConfig(timeline=0, **run), algorithm=AlgorithmConfig(name=name, args=args or {}),
                        sampling=SamplingConfig(tasks_per_sweep=2), environment=EnvironmentConfig(max_turns=max_turns))
        log = self.log = []
        self.folder = tempfile.mkdtemp(prefix="rtpo-unit-")
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)

        def note(what):
            return lambda path: log.append(f"{what} {Path(path).relative_to(self.folder)}")

        gang = SimpleNamespace(start_checkpoint=note("save"), load_checkpoint=note("load"), export=note("export"),
                               finish_checkpoint=lambda: None, restart=lambda: log.append("restart"))
        super().__init__(config=config, algorithm=algorithms.build(config.algorithm), pool=None, gang=gang, publisher=None)
        self.reached, self.moves = reached, iter(moves)

    def evaluate(self, done, tokens):
        self.log.append(f"evaluate {done} after {tokens}")
        yield {"kind": "eval"}

    def _judge(self, done, tokens):
        return next(self.evaluate(done, tokens))

    def _episodes(self, batch, ask, keep, evaluate):
        event = self._judge(self._at.sweep, self._at.tokens) if evaluate else None
        self.log.append(f"{len(batch)} x {ask.count} trunks{' with boundaries' if ask.keep_boundaries else ''}")
        return played(EpisodeCounts(episodes=2, generated_tokens=5, boundaries=Counter({turn: 2 for turn in self.reached}))), event

    def _stage(self, sweep, number, stage, trunks):
        self.log.append(stage_name(stage))
        if next(self.moves):
            self._at = replace(self._at, updates=self._at.updates + 1, unpublished=True)
        if self._at.unpublished and stage.publish:
            self._push()
        return {"kind": "stage", "generated_tokens": 10, "seconds": {}}

    def _publish(self, version):
        self.log.append(f"push v{version}")
        self._at = replace(self._at, version=version, unpublished=False)
        return Published(version=version, hash="", members=(), probe_gap=0.0, seconds=0.5)

    def _retired(self):
        return {}

    def walk(self):
        """What happened between the first evaluation and the last."""
        kinds = [event["kind"] for event in self.run(self.folder)]
        assert kinds.count("sweep") == sum("trunks" in line for line in self.log) and self.log[-1] == "export final"
        return [line for line in self.log[1:-2]]


class Files:
    """Tasks out of files that change."""

    def __init__(self, **fingerprints):
        self.found = {f"data.{name}": value for name, value in fingerprints.items()}

    def training(self, sweep, count):
        return [Task(task_id=str(number), seed=number) for number in range(count)]

    def fingerprints(self):
        return self.found


def test_a_run_goes_on_with_the_files_that_it_began_with_or_not_at_all():
    made = Walk(sweeps=1)
    made._tasks = Files(train="x", held_out="y")
    list(made.run(made.folder))
    assert json.loads((Path(made.folder) / "data.json").read_text()) == {"data.train": "x", "data.held_out": "y"}
    made._tasks = Files(train="x", held_out="z")
    with pytest.raises(DataError, match=r"the files of data\.held_out are not those that the run began with"):
        list(made.run(made.folder, "the run was started again"))
    made._tasks = Files(train="x", held_out="x")
    with pytest.raises(DataError, match=r"data\.held_out names the rows of data\.train once more"):
        list(made.run(made.folder))
    made._tasks = Files(train="x", held_out="y")
    made._check_tasks(Path(made.folder) / "data.json")


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
    list(made.run(made.folder))
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
    list(made.run(made.folder))
    assert made.log[-3:] == ["save checkpoints/sweep-000002", "evaluate 2 after 70", "export final"]


class Killed(Exception):
    pass


class Mortal(Walk):
    """Dies at the step `die` of its own count, or loses its learner at the steps `lose`; its states are on disk as soon as they are saved."""

    def __init__(self, folder, die=0, lose=(), **options):
        super().__init__(**options)
        self.folder, self.die, self.lose, self.count = str(folder), die, list(lose), 0
        self._gang.start_checkpoint = lambda path: Path(path).mkdir(parents=True, exist_ok=True)
        self._gang.load_checkpoint = lambda path: self.log.append(f"load {Path(path).name}")
        self._pool = SimpleNamespace(fill=SimpleNamespace(remote=lambda version: None))

    def tick(self):
        self.count += 1
        if self.count == self.die:
            raise Killed
        if self.count in self.lose:
            raise LearnerLost("rank 1 died")

    def evaluate(self, done, tokens):
        self.tick()
        return super().evaluate(done, tokens)

    def _trunks(self, sweep, evaluate):
        counts = EpisodeCounts(episodes=2, generated_tokens=5, boundaries=Counter({turn: 2 for turn in self.reached}))
        if self._at.stage >= 0:
            assert trunks_folder(self.folder, sweep).is_dir()
            return played(counts)
        if evaluate:
            yield self._evaluated(self._judge(sweep, self._at.tokens))
        self.tick()
        self.log.append(f"trunks of {sweep}")
        trunks_folder(self.folder, sweep).mkdir(parents=True, exist_ok=True)
        self._at = replace(self._at, stage=0, tokens=self._at.tokens + 5)
        self._ledger.append(self._at)
        return played(counts)

    def _stage(self, sweep, number, stage, trunks):
        self.tick()
        self.log.append(stage_name(stage))
        if next(self.moves):
            self._at = replace(self._at, updates=self._at.updates + 1, unpublished=True)
            self._save_state()
        self.tick()  # between the update and its push
        if self._at.unpublished and stage.publish:
            self._push()
        return {"kind": "stage", "turn": stage.turn, "updates": self._at.updates, "generated_tokens": 10, "seconds": {}}


def told(events):
    """What a run amounts to: its events without times, seconds and resumptions."""
    return [{key: value for key, value in event.items() if key not in ("time", "seconds")} for event in events if event["kind"] != "resume"]


def ledger_of(folder):
    with Ledger(folder) as ledger:
        return ledger.progress, ledger.events()


RUN = {"sweeps": 2, "eval_every": 1, "moves": (True,) * 50}


@pytest.fixture
def uninterrupted(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.coordinator.wait_for", lambda refs, seconds, what: refs)
    made = Mortal(tmp_path / "whole", **RUN)
    Path(made.folder).mkdir()
    list(made.run(made.folder))
    return ledger_of(made.folder) + (made.count,)


@pytest.mark.parametrize("args", [{}, {"sync_every": 0}])
def test_a_run_killed_at_any_step_ends_as_the_uninterrupted_one(tmp_path, uninterrupted, args):
    made = Mortal(tmp_path / "again", args=args, **RUN)
    Path(made.folder).mkdir()
    list(made.run(made.folder))
    (progress, events), steps = ledger_of(made.folder), made.count
    assert progress.finished and (args or told(events) == told(uninterrupted[1]))
    for die in range(1, steps + 1):
        folder = tmp_path / f"killed-{die}"
        folder.mkdir()
        with pytest.raises(Killed):
            list(Mortal(folder, die=die, args=args, **RUN).run(str(folder)))
        second = Mortal(folder, args=args, **RUN)
        resume = next(event for event in second.run(str(folder), "killed"))
        assert (resume["kind"], resume["reason"]) == ("resume", "killed")
        third = Mortal(folder, args=args, **RUN)  # resumed twice is resumed once
        list(third.run(str(folder), "killed"))
        found, found_events = ledger_of(folder)
        assert found == progress and told(found_events) == told(events), f"killed at step {die} of {steps}"
        prepared = [line for line in third.log[:2] if line.startswith(("load", "push"))]
        assert prepared[-1] == f"push v{resume['weight_version']}"  # before anyone samples
        assert len(prepared) == 2 or resume["weight_version"] == 0


def test_a_lost_learner_is_started_again_and_the_run_ends_as_if_nothing_had_happened(tmp_path, uninterrupted):
    for lose in range(1, uninterrupted[2] + 1):
        folder = tmp_path / f"lost-{lose}"
        folder.mkdir()
        made = Mortal(folder, lose=[lose, lose + 1, lose + 3], **RUN)
        events = list(made.run(str(folder)))
        assert made.log.count("restart") == sum(event["kind"] == "resume" for event in events) >= 1
        assert {event["reason"] for event in events if event["kind"] == "resume"} == {"rank 1 died"}
        progress, kept = ledger_of(folder)
        assert progress == uninterrupted[0] and told(kept) == told(uninterrupted[1]), f"lost at step {lose}"


def test_a_learner_that_is_lost_at_every_try_ends_the_run(tmp_path, uninterrupted):
    made = Mortal(tmp_path, lose=range(4, 99), **RUN)
    with pytest.raises(LearnerLost, match="rank 1 died"):
        list(made.run(str(tmp_path)))
    assert made.log.count("restart") == made._config.cluster.restarts == 3


@pytest.mark.parametrize("options", [{"args": {"sync_every": 0}}, {"state_every": 2}, {"state_every": 0}])
def test_steps_that_are_done_again_and_again_are_no_progress(tmp_path, uninterrupted, options):
    """The learner dies whenever the last stage of the first sweep comes, several steps after the point where the run goes on."""

    class Cursed(Mortal):
        def _stage(self, sweep, number, stage, trunks):
            if stage.turn == 0:
                raise LearnerLost("rank 0 died of a long sample")
            return super()._stage(sweep, number, stage, trunks)

    made = Cursed(tmp_path, **options, **RUN)
    with pytest.raises(LearnerLost, match="long sample"):
        list(made.run(str(tmp_path)))
    assert made.log.count("restart") == 3


def test_a_last_checkpoint_that_is_missing_fails_the_run_that_is_finished(tmp_path, uninterrupted):
    made = Mortal(tmp_path, **RUN)

    def finish():
        if ledger_of(tmp_path)[0].sweep == 2:
            raise CheckpointError("no space left")

    made._gang.finish_checkpoint = finish
    with pytest.raises(CheckpointError, match="finished and its model exported, but the last checkpoint is missing: no space left"):
        list(made.run(str(tmp_path)))
    assert made.log[-1] == "export final" and ledger_of(tmp_path)[0].finished


def test_a_checkpoint_for_good_that_was_cut_off_is_made_when_the_run_goes_on(tmp_path, uninterrupted):
    first = Mortal(tmp_path, checkpoint_every=1, die=uninterrupted[2] // 2 + 2, **RUN)
    with pytest.raises(Killed):
        list(first.run(str(tmp_path)))
    kept = tmp_path / "checkpoints" / "sweep-000001"
    at = ledger_of(tmp_path)[0]
    if at.sweep == 1 and at.stage < 0:
        kept.rmdir()
    second = Mortal(tmp_path, checkpoint_every=1, **RUN)
    list(second.run(str(tmp_path), "killed"))
    assert kept.is_dir() and (tmp_path / "checkpoints" / "sweep-000002").is_dir()


def test_a_state_that_cannot_be_written_is_reported_and_the_run_goes_on(tmp_path, uninterrupted):
    made = Mortal(tmp_path, **RUN)
    answers = iter([None, CheckpointError("no space left"), *[None] * 50])

    def finish():
        if error := next(answers):
            raise error

    made._gang.finish_checkpoint = finish
    events = list(made.run(str(tmp_path)))
    assert [event["unsaved"] for event in events if event["unsaved"]] == ["no space left"] and ledger_of(tmp_path)[0].finished


def test_a_run_whose_trunks_all_fail_ends_with_the_first_error(tmp_path):
    class Barren(Walk):
        def _episodes(self, batch, name, ask, keep):
            dead = Counter({"EngineError: no room": 2}) if self._at.sweep != 1 else Counter()  # sweep 1 works: the count begins again
            return played(EpisodeCounts(episodes=2, failed=dead, failed_first={name: "train-0/0" for name in dead})), None

    made = Barren(sweeps=9, eval_every=0)
    with pytest.raises(RtpoError, match=r"all trunks of 3 sweeps in a row failed; in sweep 4, train-0/0: EngineError: no room"):
        list(made.run(made.folder))


def test_rates_of_nothing_are_none():
    assert (rate(1, 4), rate(0, 4), rate(0, 0)) == (0.25, 0.0, None)


def test_phases_and_other_add_up_to_the_total():
    stage = {"generate": 2.0, "credit": 0.5, "overlapped": 1.5, "learn": 2.0, "broadcast": 1.0, "other": 9.0, "total": 9.0}
    found = phases([{"generate": 1.0}, stage], 7.0)
    assert found == {"generate": 3.0, "credit": 0.5, "overlapped": 1.5, "learn": 2.0, "broadcast": 1.0, "other": 1.0, "total": 7.0}


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
