"""The coordinator: walks turns K-1 down to 0.

    sweep ── tasks ──► trunks: whole episodes, every boundary kept        (object store; references here)
      │
      └─ for each stage of the algorithm (RTPO: turn K-1 .. 0)
           pool ready ─► boundaries ─► siblings ─► groups ─► credit ─► samples        one Ray Data execution, streamed
                                                                  └─ block by block ─► learner ranks
           all blocks in ──► learner gang: update ──► weights to every generator, proved ──► next stage

What unblocks what: the update waits for the stage's last block; the next stage waits until every serving generator proved the
new version. A stage whose turn no trunk reached, or whose groups all have equal returns, changes nothing and pushes nothing; a method
that collects once (GRPO) has one stage, on the trunks themselves, and one that lets generators fall behind pushes at the sweep's end.
The coordinator holds references and counts, never token arrays. `run` yields one event (a dict) a stage, sweep and evaluation; each is in
the run's ledger first. A run that was killed, and one whose learner is lost, goes on from the last step there whose state is on disk.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray.data

from actors.evaluator import Evaluator, Event
from actors.events import phases, stage_event, stage_name
from actors.gang import LearnerGang, Taken
from actors.publisher import Published, WeightPublisher
from actors.waiting import answered, wait_for
from pipelines.collect import Ask, EpisodeCounter, count_rollouts, read_episodes, stage_of_episodes, stage_samples
from pipelines.counts import EpisodeCounts, StageCounts
from pipelines.tasks import TaskSource
from rtpo_ray.algorithms.base import Algorithm, Stage
from rtpo_ray.config import Config
from rtpo_ray.errors import CheckpointError, ConservationError, DataError, DeadlineExceeded, LearnerLost, RtpoError, WeightSyncError
from rtpo_ray.folders import write_whole
from rtpo_ray.ledger import Ledger, Progress, state_folder, trunks_folder
from rtpo_ray.reports.scores import rate
from rtpo_ray.timeline import chrome_trace
from rtpo_ray.types import Task, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunks:
    """The trunks of a sweep."""

    episodes: ray.data.MaterializedDataset | None  # where they lie; None: only in the samples that were taken
    counts: EpisodeCounts
    seconds: dict[str, float]  # by phase
    occupancy: dict[str, float | None] = field(default_factory=dict)
    taken: Taken | None = None  # by the learner, of a stage that is made of them alone

BARREN_SWEEPS = 3  # sweeps in a row without any trunk that end a run: whatever breaks them is there to stay


class Coordinator(Evaluator):
    """Args:
    config: the whole configuration.
    algorithm: stages, credit and objective.
    pool: actor handle of the generator pool.
    gang: the learner ranks.
    publisher: brings generators to the learner's weights.
    tasks: where they come from; by default from seeds.
    """

    def __init__(self, *, config: Config, algorithm: Algorithm, pool: Any, gang: LearnerGang, publisher: WeightPublisher,
                 tasks: TaskSource | None = None) -> None:
        super().__init__(config=config, pool=pool, publisher=publisher, tasks=tasks)
        self._algorithm, self._gang = algorithm, gang
        self._at = Progress()  # where the run stands
        self._barren = 0  # sweeps in a row whose trunks all failed
        self._unsaved = ""  # why the last checkpoint could not be written, until an event has said so

    def run(self, folder: str, reason: str = "") -> Iterator[Event]:
        """Train, or go on with what `folder` holds of this run, because of `reason`; events as they happen."""
        self._folder = folder
        self._check_tasks(Path(folder) / "data.json")
        with Ledger(folder) as self._ledger:
            in_vain, last = 0, Progress(sweep=-1)  # losses of the learner that the run went on from at one and the same point
            while True:
                try:
                    if reason:
                        yield from self._resume(reason)
                    yield from self._walk()
                    break
                except LearnerLost as error:
                    point = self._ledger.resume_point
                    in_vain, last = (in_vain + 1 if point == last else 1), point
                    if in_vain > self._config.cluster.restarts:
                        raise
                    reason = str(error)
                    self.doing.now("starting the learner again")
                    self._gang.restart()
                except DeadlineExceeded as error:
                    raise DeadlineExceeded(f"{self.doing.what}: {error}") from error

    def _check_tasks(self, kept: Path) -> None:
        """Whether the files of tasks are those that the run began with: in others the same places hold other tasks. Raises DataError."""
        found = self._tasks.fingerprints()
        if len(set(found.values())) < len(found):
            raise DataError("field data.held_out names the rows of data.train once more; held-out tasks must not be trained on")
        before = json.loads(kept.read_text()) if kept.exists() else found
        if changed := [field for field in found if before.get(field) != found[field]]:
            raise DataError(f"the files of {changed[0]} are not those that the run began with: their rows have changed, so held-out tasks and "
                            "the order would too; give it the old ones, or begin another run")
        if found and not kept.exists():
            write_whole(kept, json.dumps(found))

    def _walk(self) -> Iterator[Event]:
        """From where the run stands to its end."""
        while True:
            due = self._evaluation_due()
            beside = due and self._config.run.overlap and self._config.run.eval_tasks > 0 and not self._over()  # the next trunks
            if due and not beside:
                for event in self.evaluate(self._at.sweep, self._at.tokens):
                    yield self._evaluated(event)
            if self._over():
                break
            yield from self._sweep(beside)
        self.doing.now("export of the trained model")
        self._finish_saving()
        self._gang.export(f"{self._folder}/final")
        self._ledger.append(replace(self._at, finished=True))
        if self._unsaved:
            raise CheckpointError(f"the run is finished and its model exported, but the last checkpoint is missing: {self._unsaved}")

    def _sweep(self, evaluate: bool) -> Iterator[Event]:
        """Trunks, then every stage on them. `evaluate`: beside the trunks, by the same weights."""
        started, began, sweep = time.perf_counter(), time.time(), self._at.sweep
        trunks = yield from self._trunks(sweep, evaluate)
        counts, spent = trunks.counts, [trunks.seconds]
        for number, stage in enumerate(self._algorithm.stages(self._config.environment.max_turns)):
            if number >= self._at.stage and (stage.turn is None or counts.boundaries[stage.turn]):
                event = self._stage(sweep, number, stage, trunks)
                spent.append(event["seconds"])
                yield self._commit(event, stage=number + 1, tokens=self._at.tokens + event["generated_tokens"])
        if self._at.unpublished:
            spent.append({"broadcast": self._push().seconds})
        event = {"kind": "sweep", "sweep": sweep, "tasks": self._config.sampling.tasks_per_sweep,
                 "trunk_success": rate(counts.successes, counts.judged),
                 "trunk_turns_mean": rate(counts.turns, counts.judged), "trunk_ends": dict(counts.ends), "failed": dict(counts.failed),
                 "failed_first": counts.failed_first, "generated_tokens": counts.generated_tokens, "weight_version": self._at.version,
                 "occupancy": trunks.occupancy, "retired": self._retired(), "seconds": phases(spent, time.perf_counter() - started)}
        self._keep_timeline(sweep, began)
        yield self._commit(event, sweep=sweep + 1, stage=-1)
        self._save_for_good()

    def _trunks(self, sweep: int, evaluate: bool) -> Generator[Event, None, Trunks]:
        """The trunks of a sweep, what they amount to, and the seconds that they took; read back when the run was resumed in its middle."""
        method, kept = self._algorithm, trunks_folder(self._folder, sweep) if self._config.run.state_every else None
        if self._at.stage >= 0:
            episodes = read_episodes(trunks_folder(self._folder, sweep), self._home())
            counts = count_rollouts(episodes.to_arrow_refs(), self._config.sampling.stage_timeout, home=self._home())
            return Trunks(episodes=episodes, counts=counts, seconds={})
        beside = ", beside an evaluation" if evaluate else ""
        self.doing.now(f"sweep {sweep}, trunks: {method.n_trunks} of {self._config.sampling.tasks_per_sweep} tasks each{beside}")
        batch = self._tasks.training(sweep, self._config.sampling.tasks_per_sweep)
        ask = self._ask("trunks", sweep, count=method.n_trunks, keep_boundaries=method.branching)
        trunks, event = self._episodes(batch, ask, kept, evaluate)
        counts = trunks.counts
        if event is not None:  # in the ledger before the trunks: whoever resumes after these does not evaluate again
            yield self._evaluated(event)
        self._barren = self._barren + 1 if counts.failed.total() == counts.episodes else 0
        if self._barren == BARREN_SWEEPS:
            message = next(iter(counts.failed))
            raise RtpoError(f"all trunks of {BARREN_SWEEPS} sweeps in a row failed; in sweep {sweep}, {counts.failed_first[message]}: {message}")
        self._at = replace(self._at, stage=0, tokens=self._at.tokens + counts.generated_tokens)
        self._ledger.append(self._at)
        if kept is not None and trunks.taken is None:  # a block that is lost with its node is then read again, not sampled by weights that are gone
            trunks = replace(trunks, episodes=read_episodes(kept, self._home()))
        return trunks

    def _episodes(self, batch: Sequence[Task], ask: Ask, keep: Path | None, evaluate: bool) -> tuple[Trunks, Event | None]:
        """Trunks of `batch`, and the evaluation that went on beside them. `keep`: a folder in which they are kept as well."""
        self._ready(len(batch) * ask.count + evaluate * self._evaluated_rollouts)
        with self._joining(), ThreadPoolExecutor(1, "evaluation") as beside, self._timeline.span("trunks"):
            judged = beside.submit(self._judge, self._at.sweep, self._at.tokens) if evaluate else None
            play = self._play_and_take if self._takes_at_once else self._play_trunks
            trunks = play(batch, self._capped(ask), keep)
            event = None if judged is None else {**self._result(judged), "retired": self._retired()}
        return replace(trunks, seconds={**trunks.seconds, "generate": self._busy()}, occupancy=self._occupancy()), event

    def _result(self, judged: Future[Event]) -> Event:
        """Of an evaluation beside the trunks, which has deadlines of its own: for what is sampled and what is played greedily."""
        seconds = 2 * (self._config.sampling.stage_timeout + self._config.cluster.patience)
        if not futures_wait([judged], seconds).done:
            raise DeadlineExceeded(f"waited {seconds:g} s for the evaluation beside the trunks of sweep {self._at.sweep}")
        return judged.result()

    @property
    def _takes_at_once(self) -> bool:
        """Whether the only stage is made of trunks alone and its gradient adds up: then it is taken while they are sampled."""
        stages = self._algorithm.stages(self._config.environment.max_turns)
        return self._config.run.overlap and not self._algorithm.branching and len(stages) == 1 and self._algorithm.objective.adds_up

    def _play_trunks(self, batch: Sequence[Task], ask: Ask, keep: Path | None) -> Trunks:
        episodes, counts = self._play(batch, "trunks", ask, keep)
        return Trunks(episodes=episodes, counts=counts, seconds={})

    def _play_and_take(self, batch: Sequence[Task], ask: Ask, keep: Path | None) -> Trunks:
        rollouts = len(batch) * ask.count
        (stage,) = self._algorithm.stages(self._config.environment.max_turns)
        blocks = stage_of_episodes(batch, stage, self._config.algorithm, ask, self._collection(), self._blocks(rollouts))
        counter = EpisodeCounter(keep, self._home())
        taken = self._gang.take(counter.through(blocks), stream=True)
        counts = counter.total(self._config.sampling.stage_timeout)
        self._check_episodes("trunks", rollouts, counts)
        return Trunks(episodes=None, counts=counts, taken=taken, seconds={"overlapped": taken.overlapped, "learn": taken.waited})

    def _stage(self, sweep: int, number: int, stage: Stage, trunks: Trunks) -> Event:
        """One stage: collect and credit, update, publish."""
        started, where = time.perf_counter(), f"sweep {sweep}, {stage_name(stage)}"
        taken, spent = (trunks.taken, {}) if trunks.taken else self._collect(sweep, number, stage, trunks)
        counts = taken.counts
        self._check(counts, where, stage, trunks.counts)
        collected = time.perf_counter()
        self.doing.now(f"{where}: the learner's update")
        seed = derive_seed(self._config.run.seed, sweep, "update", number if stage.turn is None else stage.turn)
        with self._timeline.span(f"{stage_name(stage)}: update", "stages"):
            update = self._gang.update(counts.groups, counts.comparable, seed)
        learned = time.perf_counter()
        if update.optimizer_steps:
            self._at = replace(self._at, updates=self._at.updates + 1, unpublished=True)
            self._save_state()
        published = self._push() if self._at.unpublished and stage.publish else None
        done = time.perf_counter()
        spent = {**spent, "credit": counts.credit_seconds, "learn": spent.get("learn", 0.0) + learned - collected, "broadcast": done - learned}
        return stage_event(sweep, stage, counts, update, published) | {
            "occupancy": self._occupancy(), "retired": self._retired(), "seconds": phases([spent], done - started)}

    def _collect(self, sweep: int, number: int, stage: Stage, trunks: Trunks) -> tuple[Taken, dict[str, float]]:
        """A stage's samples, sampled by the generators and taken by the learner, and the seconds by phase."""
        assert trunks.episodes is not None, "trunks whose samples were not taken lie in the object store"
        self.doing.now(f"sweep {sweep}, {stage_name(stage)}: samples from the generators, taken by the learner")
        self._ready(self._siblings(stage, trunks.counts))
        ask = self._capped(self._ask("siblings", sweep, number if stage.turn is None else stage.turn))
        with self._joining(), self._timeline.span(f"{stage_name(stage)}: samples", "stages"):
            blocks = stage_samples(trunks.episodes, stage, self._config.algorithm, ask, self._collection())
            taken = self._gang.take(blocks, self._config.run.overlap)
        return taken, {"generate": self._busy(), "overlapped": taken.overlapped, "learn": taken.waited}

    def _siblings(self, stage: Stage, episodes: EpisodeCounts) -> int:
        """About how many a stage samples: what branches grow is known block by block only."""
        if stage.turn is not None:
            return episodes.boundaries[stage.turn] * stage.n_siblings
        return 2 * episodes.episodes if self._algorithm.branching else 0

    def _joining(self) -> AbstractContextManager[None]:
        """Nobody can join while the learner is ahead of the weights that are served."""
        return nullcontext() if self._at.unpublished else super()._joining()

    def _blocks(self, rollouts: int) -> int:
        """Trunks stay in their blocks when siblings branch off them, and then there are more rollouts."""
        stages = self._algorithm.stages(self._config.environment.max_turns)
        return super()._blocks(rollouts * max(1, *(stage.n_siblings for stage in stages)))

    def _refit(self) -> None:
        self._publish(self._at.version + self._at.unpublished)  # newer weights never go by an old version's number

    def _publish(self, version: int) -> Published:
        before = self.doing.what
        self.doing.now(f"sweep {self._at.sweep}: weights to the generators as version {version}")
        with self._timeline.span(f"push of version {version}", "stages"):
            published = super()._publish(version)
        self.doing.now(before)
        self._at = replace(self._at, version=version, unpublished=False)
        return published

    def _push(self) -> Published:
        return self._publish(self._at.version + 1)

    # --- what comes next, and what is done

    def _evaluation_due(self) -> bool:
        """Before training, at its end, and every so many sweeps or tokens between."""
        run, at = self._config.run, self._at
        if at.stage >= 0 or at.evaluated == at.sweep:
            return False
        if at.evaluated < 0 or self._over():
            return True
        if run.eval_every_tokens:
            return at.evaluated_tokens // run.eval_every_tokens < at.tokens // run.eval_every_tokens
        return bool(run.eval_every) and at.sweep % run.eval_every == 0

    def _over(self) -> bool:
        run, at = self._config.run, self._at
        return at.stage < 0 and (at.sweep >= run.sweeps or 0 < run.tokens <= at.tokens)

    def _evaluated(self, event: Event) -> Event:
        return self._commit(event, evaluated=self._at.sweep, evaluated_tokens=self._at.tokens)

    def _keep_timeline(self, sweep: int, began: float) -> None:
        """What every process did in this sweep, when it is one of the first."""
        if sweep >= self._config.run.timeline:
            return
        members = wait_for(self._pool.members.remote(), self._config.cluster.patience, "the generator pool's members")
        asked = [actor.take_spans.remote() for actor in (*self._gang.ranks, *(lease.generator for lease in members))]
        spans = [*self._timeline.take(), *itertools.chain.from_iterable(answered(asked, self._config.cluster.patience))]
        folder = Path(self._folder) / "timeline"
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"sweep-{sweep:06d}.json", json.dumps(chrome_trace(span for span in spans if span.end >= began)))

    def _commit(self, event: Event, **changes: Any) -> Event:
        """One finished step in the ledger; its event with the time."""
        self.doing.now(f"sweep {self._at.sweep}, between two steps")
        self._at = replace(self._at, **changes)
        kept = self._ledger.append(self._at, {**event, "unsaved": self._unsaved})
        self._ledger.prune(self._config.run.keep_states)
        self._unsaved = ""
        return kept

    def _resume(self, reason: str) -> Iterator[Event]:
        """Back to the last step that can be built upon; the generators get its weights before anyone samples."""
        self._at, undone = self._ledger.rewind()
        self._at = replace(self._at, finished=False)
        if self._at.updates:
            self._gang.load_checkpoint(str(state_folder(self._folder, self._at.updates)))
        yield self._commit({"kind": "resume", "sweep": self._at.sweep, "stage": self._at.stage, "weight_version": self._at.version,
                            "undone": undone, "reason": reason})
        self._save_for_good()
        wait_for(self._pool.fill.remote(self._at.version), self._config.cluster.start_timeout + 60, "the generator pool to have its generators ready")
        self._publish(self._at.version)

    def _save_state(self) -> None:
        """Of the learner, in the background, as often as configured."""
        every = self._config.run.state_every
        if every and self._at.updates % every == 0:
            self._save(str(state_folder(self._folder, self._at.updates)))

    def _save_for_good(self) -> None:
        """Of the sweep that has just ended, when one is due and not there: a resumed run may begin just before it."""
        every, done = self._config.run.checkpoint_every, self._at.sweep
        path = Path(self._folder) / "checkpoints" / f"sweep-{done:06d}"
        if every and self._at.stage < 0 and done and done % every == 0 and not path.is_dir():
            self._save(str(path))

    def _save(self, path: str) -> None:
        """Begin to write a checkpoint, once the one before is written."""
        self._finish_saving()
        self._gang.start_checkpoint(path)

    def _finish_saving(self) -> None:
        """A run goes on without a checkpoint that cannot be written, and says so; it is then resumed from the one before."""
        try:
            self._gang.finish_checkpoint()
        except CheckpointError as error:
            self._unsaved = str(getattr(error, "cause", error))  # without the rank's traceback

    def _check(self, counts: StageCounts, where: str, stage: Stage, episodes: EpisodeCounts) -> None:
        """Conservation, and no stale sample."""
        accounted = counts.trained + counts.filtered.total() + counts.failed.total()
        if stage.turn is None:  # what branches grow is known block by block, and checked there
            least = most = counts.siblings if self._algorithm.branching else episodes.episodes
            asked = f"{episodes.episodes} episodes"
        else:
            least, most = (episodes.boundaries[stage.turn] * each for each in stage.siblings_a_boundary)
            each = f"{stage.n_siblings} siblings = {most}" if least == most else f"{stage.pilots} to {stage.n_siblings} siblings = {least} to {most}"
            asked = f"{episodes.boundaries[stage.turn]} boundaries x {each}"
        if not (least <= counts.siblings <= most and counts.siblings == accounted):
            raise ConservationError(f"{where}: {asked} were asked for; {counts.siblings} came back, {counts.trained} trained + "
                                    f"{dict(counts.filtered)} filtered + {dict(counts.failed)} failed")
        if not counts.versions <= {self._version}:
            raise WeightSyncError(f"{where}: siblings were sampled by weight versions {sorted(counts.versions)}; expected only {self._version}")
