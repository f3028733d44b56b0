"""`rtpo doctor`: everything about an environment that a run would trip over, found in seconds without Ray and without sampling a model.

Episodes are played by a script: tool calls made up from their schemas, a malformed one, demonstrations where the environment has any, and at last an
answer. Every episode is then played again from the start and from each of its boundaries, and must be the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtpo_ray import algorithms
from rtpo_ray.config import Config
from rtpo_ray.data import find_files, read_rows, to_fields
from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.base import ToolEnvironment
from rtpo_ray.episodes.contexts import ChatTemplate
from rtpo_ray.episodes.episode import Episode, environment_maker, episode_settings
from rtpo_ray.episodes.script import Script
from rtpo_ray.errors import DataError
from rtpo_ray.secrets import conceal
from rtpo_ray.types import Boundary, Rollout, Sampling, Task, TurnRecord, derive_seed

TASKS = 8  # that are looked at
INSTANT_MS = 1.0
LARGE_SNAPSHOT = 1 << 20  # bytes: a stage carries one a boundary
ENDPAPER = 400  # characters of a context that are shown at either end
UNCUT = 1 << 20  # tokens: a worked solution, said as an answer, is not to be cut
PATIENCE = 600.0  # seconds for one episode by script, whose steps have deadlines of their own


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found: `kind` is ok, warn or FAIL."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Played:
    """An episode by script: what it was, what was said in it, and how long its steps took."""

    rollout: Rollout
    texts: tuple[str, ...]
    seconds: tuple[float, ...]


class Doctor:
    """Args:
    config: what is to be examined.
    template: of the model's tokenizer.
    """

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self._config, self._template, self._settings = config, template, episode_settings(config)
        self._environment = environment_maker(config, template)
        self._branching = algorithms.build(config.algorithm).branching
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(Daemons())

    def examine(self) -> Iterator[Finding]:
        """Everything in order, secrets concealed. A FAIL before episodes were played ends the examination: the rest builds on it."""
        for finding in self._examine():
            yield replace(finding, text=conceal(finding.text, dict(self._config.environment.args)))

    def _examine(self) -> Iterator[Finding]:
        self._example = self._environment()  # to be asked what it is
        try:
            yield from self._look()
        finally:
            self._example.close()

    def _look(self) -> Iterator[Finding]:
        try:
            tasks = self._tasks()
        except DataError as error:
            yield Finding("FAIL", f"data: {error}")
            return
        played: list[Played] = []
        for what, look in (("tools", lambda: self._look_at_tools(tasks[0])), ("contexts", lambda: self._look_at_contexts(tasks)),
                           ("episodes", lambda: self._play_all(tasks, played))):
            found = list(self._guarded(what, look))
            yield from found
            if any(finding.kind == "FAIL" for finding in found):
                return
        self.sample = max((one.rollout for one in played), key=lambda rollout: len(rollout.turns))
        yield from self._guarded("determinism", lambda: self._look_at_determinism(tasks, played))
        yield from self._guarded("branching", lambda: self._look_at_branching(tasks, played))
        yield from self._guarded("rewards", lambda: self._look_at_rewards(tasks, played))
        yield from self._look_at_masks(played)
        yield from self._look_at_seconds(played)

    sample: Rollout | None = None  # an episode to be shown, when it came so far

    def _tasks(self) -> list[Task]:
        fields = self._example.fields
        seeds = [derive_seed("doctor", number) for number in range(TASKS)]
        if not fields:
            return [Task(task_id=f"seed-{seed}", seed=seed) for seed in seeds]
        found: list[Task] = []
        names = [name for name in ("train", "held_out") if getattr(self._config.data, name)]
        for number, name in enumerate(names, 1):
            most, before = TASKS * number // len(names), len(found)
            for file in find_files(f"data.{name}", getattr(self._config.data, name)):
                for place, row in enumerate(itertools.islice(read_rows(file), most - len(found))):
                    where = f"{file}, row {place}"
                    found.append(Task(task_id=f"{Path(file).name}:{place}", seed=seeds[len(found)],
                                      payload=json.loads(json.dumps(to_fields(row, self._config.data.fields, fields, where), default=str))))
            if len(found) == before:
                raise DataError(f"field data.{name} is {getattr(self._config.data, name)!r}: its files hold no row")
        return found

    def _guarded(self, what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - anything may come out of a user's environment, and is what the doctor is asked for
            yield Finding("FAIL", f"{what}: {type(error).__name__}: {error}{_where(error)}{_advice(error)}")

    # --- what is looked at

    def _look_at_tools(self, task: Task) -> Iterator[Finding]:
        with self._episode(task) as episode:
            environment, first = episode.environment, episode.first
            schemas = environment.tools()
        if not schemas:
            yield Finding("ok", "tools: none")
            return
        names = [schema["function"]["name"] for schema in schemas]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Finding("FAIL", f"tools: {names.count(name)} are called {name!r}; a call could mean any of them")
        for schema in schemas:
            yield from _complaints(schema["function"])
        form = f", called as {environment.calls}" if isinstance(environment, ToolEnvironment) else ""
        yield Finding("ok", f"tools: {', '.join(names)}{form}")
        messages, shown = self._template.opening(environment.system, schemas, first)
        text = self._template.render(messages, shown, prompt=True)
        if unseen := [name for name in names if name not in text]:
            yield Finding("warn", f"template: the first context does not show {', '.join(unseen)}; set environment.tools_in=system, or train a model "
                                  "that knows")
        else:
            yield Finding("ok", "template: the first context shows the tools")

    def _look_at_contexts(self, tasks: Sequence[Task]) -> Iterator[Finding]:
        lengths = []
        for task in tasks:
            with self._episode(task) as episode:
                lengths.append(len(episode.context()))
        limit, response, turns = self._settings.max_model_len, self._settings.max_response_tokens, self._settings.max_turns
        said = f"contexts: c_0 has {min(lengths)} to {max(lengths)} tokens"
        if max(lengths) >= limit:
            yield Finding("FAIL", f"{said}; generators.max_model_len ({limit}) leaves no room for a response")
        elif max(lengths) + turns * response > limit:
            yield Finding("warn", f"{said}; with {turns} responses of up to {response} tokens they can outgrow generators.max_model_len "
                                  f"({limit}): such episodes end as overlong")
        else:
            yield Finding("ok", f"{said}; {turns} responses of {response} fit generators.max_model_len ({limit}), observations aside")

    def _play_all(self, tasks: Sequence[Task], played: list[Played]) -> Iterator[Finding]:
        for number, task in enumerate(tasks):
            played.append(self._play(task, Script(number, self._settings.max_turns)))
        turns = [len(one.rollout.turns) for one in played]
        ends = sorted({one.rollout.end for one in played})
        calls = sum(turn.tool_calls for one in played for turn in one.rollout.turns)
        failed = sum(turn.failed_calls for one in played for turn in one.rollout.turns)
        kind = "warn" if "overlong" in ends else "ok"
        yield Finding(kind, f"episodes: {len(played)} played by script in {min(turns)} to {max(turns)} turns, ended {', '.join(ends)}; "
                            f"{calls} tool calls, {failed} of them failed")

    def _look_at_determinism(self, tasks: Sequence[Task], played: Sequence[Played]) -> Iterator[Finding]:
        for task, one in zip(tasks, played, strict=True):
            again = self._play(task, one.texts)
            if wrong := _difference(one.rollout.turns, again.rollout.turns):
                yield Finding("FAIL", f"determinism: task {task.task_id}, played twice from the same seed with the same responses: {wrong}; take all "
                                      "randomness from the seed that reset is given, and nothing from time or global state")
                return
        yield Finding("ok", f"determinism: {len(tasks)} episodes played again are the same, state hashes, contexts and rewards included")

    def _look_at_branching(self, tasks: Sequence[Task], played: Sequence[Played]) -> Iterator[Finding]:
        bad = "FAIL" if self._branching else "warn"
        if reason := self._example.branching_error():
            yield Finding(bad, f"branching: {reason}")
            return
        sizes, restored = [], 0
        for task, one in zip(tasks, played, strict=True):
            for boundary in _some(one.rollout.boundaries):
                sizes.append(len(boundary.snapshot))
                begins = next(place for place, turn in enumerate(one.rollout.turns) if turn.turn == boundary.turn)
                with self._episode(boundary) as episode:
                    rest = self._run(episode, task, one.texts[begins:])
                restored += 1
                if wrong := _difference(one.rollout.turns[begins:], rest.rollout.turns):
                    yield Finding(bad, f"branching: task {task.task_id}, restored at turn {boundary.turn} and given the same responses: {wrong}")
                    return
        how = "replaying the responses" if self._example.replay else "its snapshot"
        yield Finding("ok", f"branching: {restored} boundaries restored by {how} go on as the trunk did; {statistics.median(sizes):,.0f} bytes each")
        if max(sizes) > LARGE_SNAPSHOT:
            yield Finding("warn", f"branching: a snapshot has {max(sizes):,} bytes; name what follows from the seed or the row in `unsaved`")

    def _look_at_rewards(self, tasks: Sequence[Task], played: Sequence[Played]) -> Iterator[Finding]:
        returns = [one.rollout.returns_to_go for one in played]
        odd = not all(0 <= value <= 1 for value in returns)
        if odd:
            yield Finding("warn", f"rewards: returns from {min(returns):g} to {max(returns):g}; success is counted as a positive one, and advantages "
                                  "are not normalised by every method")
        answers = [(task, task.payload["answer"]) for task in tasks if "answer" in task.payload]
        wrong = [(task, answer) for task, answer in answers if self._gold(task, answer) <= 0]
        if answers:
            right = len(answers) - len(wrong)
            first = f"; the first that is not is {_short(wrong[0][1])} of task {wrong[0][0].task_id}" if wrong else ""
            yield Finding("ok" if not wrong else "warn" if right else "FAIL",
                          f"rewards: {right} of {len(answers)} gold answers are judged right{first}")
        if not odd:
            yield Finding("ok", f"rewards: the script's episodes returned {', '.join(f'{value:g}' for value in sorted(set(returns)))}")

    def _gold(self, task: Task, answer: Any) -> float:
        """The best return of saying the gold answer, in one of the ways in which answers are marked."""
        golds = answer if isinstance(answer, list) else [answer]
        texts = [form.format(gold) for gold in golds[:1] for form in ("{}", "\\boxed{{{}}}", "<answer>{}</answer>")]
        settings, self._settings = self._settings, replace(self._settings, max_response_tokens=UNCUT, max_model_len=2 * UNCUT)
        try:
            return max(self._play(task, (text,)).rollout.returns_to_go for text in texts)
        finally:
            self._settings = settings

    def _look_at_masks(self, played: Sequence[Played]) -> Iterator[Finding]:
        wrong = 0
        for one in played:
            turns = one.rollout.turns
            for turn in turns:
                wrong += turn.loss_mask != (False,) * len(turn.context_ids) + (True,) * len(turn.response_ids)
            if self._settings.context == "append":
                wrong += sum(after.context_ids[: len(before.context_ids) + len(before.response_ids)] != before.context_ids + before.response_ids
                             for before, after in itertools.pairwise(turns))
        tokens = sum(len(turn.response_ids) for one in played for turn in one.rollout.turns)
        yield Finding("FAIL" if wrong else "ok", f"masks: {tokens:,} sampled tokens are trained, and nothing else" if not wrong else
                      f"masks: {wrong} turns whose context is not what came before and what was sampled")

    def _look_at_seconds(self, played: Sequence[Played]) -> Iterator[Finding]:
        spent = [1000 * seconds for one in played for seconds in one.seconds]
        said = f"seconds: a step takes {statistics.median(spent):.2f} ms, at most {max(spent):.1f}"
        instant = self._example.instant
        if instant and statistics.median(spent) > INSTANT_MS:
            yield Finding("warn", f"{said}; it is declared instant, so the engine waits for it: set instant = False")
        else:
            yield Finding("ok", said + (", between two steps of the engine" if instant else ", in a thread"))

    # --- playing

    def _play(self, task: Task, texts: Sequence[str] | Script) -> Played:
        with self._episode(task) as episode:
            return self._run(episode, task, texts)

    @contextmanager
    def _episode(self, start: Task | Boundary) -> Iterator[Episode]:
        """At the start of a task, or at a boundary; closed afterwards. Everything has the deadline of a step."""
        episode = Episode(self._environment, self._template, self._settings)
        try:
            begin = episode.reset if isinstance(start, Task) else episode.restore
            self._loop.run_until_complete(episode.off_loop("reset or restore", begin, start))
            yield episode
        finally:
            self._loop.run_until_complete(episode.close())

    def _run(self, episode: Episode, task: Task, texts: Sequence[str] | Script) -> Played:
        """From where `episode` stands, saying `texts`."""
        said: list[str] = []
        at: list[float] = []
        begin = episode.turn

        def reply(context: tuple[int, ...], sampling: Sampling) -> list[int]:
            at.append(time.perf_counter())
            number = len(said)
            text = texts(episode) if isinstance(texts, Script) else texts[number] if number < len(texts) else ""
            said.append(text)
            return [*self._template.encode(text), *sampling.stop_token_ids[:1]]

        engine = ScriptedEngine(reply, max_model_len=self._settings.max_model_len)

        async def play() -> Rollout:
            async with asyncio.timeout(PATIENCE):
                return await episode.run(engine, rollout_id=task.task_id, task_id=task.task_id, seed=1, temperature=1.0, keep_boundaries=True)

        rollout = self._loop.run_until_complete(play())
        at.append(time.perf_counter())
        assert begin + sum(turn.kind == "action" for turn in rollout.turns) == episode.turn
        return Played(rollout, tuple(said), tuple(after - before for before, after in itertools.pairwise(at)))


class Daemons(ThreadPoolExecutor):
    """A thread a call, which nobody waits for at the end: a step that overran its deadline may never return."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                future.set_result(function(*args, **options))
            except BaseException as error:  # noqa: BLE001 - raised to whoever waits for the future
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future


def _complaints(function: dict[str, Any]) -> Iterator[Finding]:
    """What a model would miss in a tool's schema."""
    name = function["name"]
    if not function.get("description", "").strip():
        yield Finding("warn", f"tools: {name} has no description; give the method a docstring")
    for argument, spec in function.get("parameters", {}).get("properties", {}).items():
        if not spec.get("type") and not spec.get("enum") and not spec.get("anyOf"):
            yield Finding("warn", f"tools: {name}: argument {argument} has no type; give it a type hint")
        if not spec.get("description", "").strip():
            yield Finding("warn", f"tools: {name}: argument {argument} has no description; name it under Args: in the docstring")


def _some(boundaries: Sequence[Boundary]) -> list[Boundary]:
    """The first, the middle and the last: replaying all of a long episode would take the square of its turns."""
    return [boundaries[place] for place in sorted({0, len(boundaries) // 2, len(boundaries) - 1})] if boundaries else []


COMPARED = ("turn", "state_hash", "context_hash", "response_ids", "observation", "reward", "tool_calls", "malformed_calls", "failed_calls")


def _difference(one: Sequence[TurnRecord], other: Sequence[TurnRecord]) -> str:
    """The first thing in which two courses of an episode differ; empty when they are the same."""
    for left, right in zip(one, other, strict=False):
        for name in COMPARED:
            if getattr(left, name) != getattr(right, name):
                return f"turn {left.turn}: {name} is {_short(getattr(right, name))} and was {_short(getattr(left, name))}"
    return "" if len(one) == len(other) else f"it took {len(other)} turns and took {len(one)} before"


def _where(error: BaseException) -> str:
    """The last place of the error that is not ours or a library's: a line of the user's own file, when there is one."""
    ours = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _advice(error: BaseException) -> str:
    if "pickle" in str(error):
        return ("; an attribute cannot be copied into a snapshot: name it in `unsaved` and make it again when it is needed, or declare replay = True")
    return "; a tool raises ToolError for what the model is to read" if _where(error) else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def show(rollout: Rollout, template: ChatTemplate, colour: bool) -> Iterator[str]:
    """The tokens of an episode, turn by turn: context dim, sampled ones green, every second one underlined; between brackets without colours."""
    for turn in rollout.turns:
        context = template.tokenizer.decode(turn.context_ids, skip_special_tokens=False)
        if len(context) > 2 * ENDPAPER:
            context = f"{context[:ENDPAPER]} ... {len(context) - 2 * ENDPAPER} characters ... {context[-ENDPAPER:]}"
        tokens = [template.tokenizer.decode([token], skip_special_tokens=False) for token in turn.response_ids]
        sampled = "".join(f"\033[32{';4' if number % 2 else ''}m{token}\033[0m" for number, token in enumerate(tokens)) if colour else \
            "".join(f"[{token}]" for token in tokens)
        yield f"turn {turn.turn}: {len(turn.context_ids)} tokens of context, {len(turn.response_ids)} sampled and trained"
        yield f"\033[2m{context}\033[0m{sampled}" if colour else f"{context}{sampled}"
