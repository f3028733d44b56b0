"""The multi-turn tasks of the Berkeley Function-Calling Leaderboard, version 4: a user asks for several things, one after the other.

The simulators (a file system, a car, a travel agency ...) and the descriptions of their functions are those of the package bfcl-eval;
an episode has its own instances of them. A response that calls functions is answered with their results; one that calls none ends the
user's turn, and the next request follows. The calls of the recorded solution are made on a second set of instances, turn by turn.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import datetime
import decimal
import functools
import importlib
import inspect
import json
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rtpo_ray.data import read_rows
from rtpo_ray.environments.base import Observation, Step, ToolEnvironment, ToolError
from rtpo_ray.environments.foreign import optional, state_hash
from rtpo_ray.episodes.toolcalls import ToolCall
from rtpo_ray.errors import DataError

FIELDS = ("question", "initial_config", "involved_classes", "ground_truth", "missed_function")
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # the documents' own names of JSON types
_NEW = "These functions are available from now on:\n"


def join(questions: str | Path, answers: str | Path, out: str | Path) -> int:
    """Write the tasks of the two files of a split, BFCL_v4_multi_turn_*.json and the one of the same name in possible_answer, as one jsonl
    file that `BFCL` reads. Returns how many. Raises DataError when a task has no answer."""
    truth = {answer["id"]: answer["ground_truth"] for answer in read_rows(str(answers))}
    tasks = list(read_rows(str(questions)))
    missing = [task["id"] for task in tasks if task["id"] not in truth]
    if missing:
        raise DataError(f"{answers} has no answer to {len(missing)} of the {len(tasks)} tasks of {questions}, such as {missing[0]}; "
                        "give the two files of the same split")
    rows = [{"missed_function": {}} | task | {"ground_truth": truth[task["id"]]} for task in tasks]
    Path(out).write_text("".join(json.dumps({name: row[name] for name in ("id", *FIELDS)}) + "\n" for row in rows))
    return len(tasks)


class BFCL(ToolEnvironment):
    """Rows are made by `rtpo_ray.environments.bfcl.join(questions, answers, out)` from the two files of a split, which bfcl-eval brings in
    bfcl_eval/data and bfcl_eval/data/possible_answer.

    The reward is 1 when every turn of the user passes, else 0; it comes at the end. A turn passes when, after it,
    - every public attribute of every simulator equals that of the recorded solution's, and
    - every result of the solution's calls of this turn is among the results of the model's calls so far, in any order and each as
      often, so a result fetched in an earlier turn counts, and further calls do no harm, and
    - the model called a function in it.
    A turn whose solution is empty, as where a function or a parameter is missing, always passes.

    It is not instant: a function such as `factorial` takes as long as its arguments ask for.

    Args:
        max_calls: that a user's turn may take; the episode is truncated when a response exceeds them.
        long_context: load the simulators with much irrelevant content, as the split long_context wants it.
        replay: branch by replaying recorded responses instead of copying the state.
    """

    fields = FIELDS

    def __init__(self, max_calls: int = 20, long_context: bool = False, replay: bool = False) -> None:
        super().__init__()
        if max_calls < 1:
            raise ValueError(f"max_calls is {max_calls}; expected at least 1")
        optional("bfcl_eval", "--no-deps bfcl-eval")
        self.max_calls, self.long_context, self.replay = max_calls, long_context, replay
        self.model = self.solution = Simulators({}, (), False)
        self.turn = 0  # of the user
        self.used = 0  # calls of this turn
        self.begun = 0  # results when it began
        self.passed = True  # every turn so far

    def reset(self, seed: int) -> Observation:
        """The first request. Nothing is left to the seed: what is random in a simulator follows from the task's own one. Raises DataError
        when the row lacks a field."""
        missing = [name for name in self.fields if name not in self.row]
        if missing:
            raise DataError(f"the row of the task lacks {', '.join(missing)}; it has {', '.join(self.row) or 'no field'}; see bfcl.join")
        made = [Simulators(self.row["initial_config"], self.row["involved_classes"], self.long_context) for _ in range(2)]
        self.model, self.solution = made
        self.turn, self.used, self.begun, self.passed = 0, 0, 0, True
        return Observation(self._request())

    def gold(self, turn: int) -> list[ToolCall]:
        """The calls of the recorded solution of a user's turn."""
        return [self.solution.parse(text) for text in self.row["ground_truth"][turn]]

    def schemas(self) -> list[dict[str, Any]]:
        """Of every function of the task's simulators, but those that a later turn of the user brings."""
        hidden = {name for names in self._later().values() for name in names}
        return [_schema(document) for document in self._documents() if document["name"] not in hidden]

    def names(self) -> list[str]:
        return [document["name"] for document in self._documents()]

    def misfit(self, name: str, arguments: dict[str, Any]) -> str:
        """Names alone are checked: values of any type are the simulators' to judge."""
        try:
            inspect.signature(self.model.method(name)).bind(**arguments)
        except TypeError as error:
            return str(error)
        return ""

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        return self.model.call(name, arguments)

    def step(self, response_text: str) -> Step:
        step = super().step(response_text)
        self.used += int(step.info.get("tool_calls", 0))
        return Step(truncated=True, info=step.info) if self.used > self.max_calls else step

    def answer(self, text: str) -> Step:
        """The end of the user's turn, whatever the response says."""
        self.passed &= self._judge()
        self.turn, self.used, self.begun = self.turn + 1, 0, len(self.model.results)
        if self.turn == len(self.row["question"]):
            return Step(reward=float(self.passed), terminated=True)
        return Step(observation=Observation(self._request()))

    def state_hash(self) -> str:
        """Without the solution's simulators, which follow from the turn, and the wall-clock times that files keep and nobody reads."""
        return state_hash((self.turn, self.used, self.begun, self.passed, self.model), without=("_last_modified",))

    def _judge(self) -> bool:
        """Whether the user's turn passes; makes the solution's calls."""
        gold = self.gold(self.turn)
        if not gold:
            return True
        before = len(self.solution.results)
        for call in gold:
            with contextlib.suppress(ToolError):  # a result like any other: `call` has noted it
                self.solution.call(call.name, call.arguments)
        wanted = Counter(self.solution.results[before:])
        return len(self.model.results) > self.begun and self.model.public() == self.solution.public() and wanted <= Counter(self.model.results)

    def _request(self) -> str:
        """What the user says at the start of a turn."""
        said = [message["content"] for message in self.row["question"][self.turn]]
        new = self._later().get(str(self.turn), ())
        schemas = [json.dumps(_schema(document)) for document in self._documents() if document["name"] in new]
        return "\n".join(said + ([_NEW + "\n".join(schemas)] if schemas else []))

    def _later(self) -> Mapping[str, Sequence[str]]:
        """Functions that the model is told of in a later turn of the user, by its number."""
        later: Mapping[str, Sequence[str]] = self.row["missed_function"]
        return later

    def _documents(self) -> list[dict[str, Any]]:
        return [document for name in self.row["involved_classes"] for document in _documents(name)]


class Simulators:
    """One instance of every involved class, and the results of the calls made on them.

    Args:
        config: initial state of a class, by its name.
        classes: names of the involved ones.
        long_context: see `BFCL`.
    """

    def __init__(self, config: Mapping[str, Any], classes: Sequence[str], long_context: bool) -> None:
        self.instances = {name: _class(name)() for name in classes}
        self.results: list[str] = []
        for name, instance in self.instances.items():
            if hasattr(instance, "_load_scenario"):  # MathAPI has no state
                instance._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long_context)

    def method(self, name: str) -> Callable[..., Any]:
        """The public method `name`; a later class shadows an earlier one, as in BFCL."""
        found = [getattr(instance, name) for instance in self.instances.values() if hasattr(instance, name)]
        return _isolated(found[-1])

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result, as BFCL writes it: JSON, or Python's text of what has none. Raises ToolError with what the simulator raised."""
        try:
            with decimal.localcontext():  # square_root sets the thread's precision
                text = _text(self.method(name)(**arguments))
        except Exception as error:  # a simulator may raise anything on arguments of the wrong kind
            self.results.append(f"Error during execution: {error}")
            raise ToolError(str(error)) from error
        self.results.append(text)
        return text

    def public(self) -> dict[str, dict[str, Any]]:
        """The attributes that BFCL compares, by class."""
        return {name: {key: value for key, value in vars(instance).items() if not key.startswith("_")} for name, instance in self.instances.items()}

    def parse(self, text: str) -> ToolCall:
        """A call written in Python, with literals for arguments, such as "sort('a.txt')". Raises DataError when it is anything else."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                raise ValueError("no call of a function")
            values = [ast.literal_eval(argument) for argument in call.args]
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            return ToolCall(call.func.id, dict(inspect.signature(self.method(call.func.id)).bind(*values, **named).arguments))
        except (SyntaxError, ValueError, TypeError, IndexError) as error:
            raise DataError(f"field ground_truth holds {text!r}; expected a call of one of the task's functions with literals: {error}") from error


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result) if isinstance(result, dict) else str(result)
    except (TypeError, ValueError):  # numbers that JSON does not know
        return str(result)


class _Clock(datetime.datetime):
    """Today is the day of the simulated stock exchange."""

    @classmethod
    def today(cls) -> _Clock:
        return cls(2024, 9, 1, 10, 30)


def _mpmath() -> types.SimpleNamespace:
    """What `logarithm` uses of mpmath, with a precision of its own."""
    import mpmath

    context = mpmath.mp.clone()
    return types.SimpleNamespace(mp=context, log=context.log)


# Methods that read the clock or change what is global: the name in their module that is replaced for one call, and by what.
_STRAY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "verify_traveler_information": ("datetime", lambda _: _Clock),
    "logarithm": ("mpmath", lambda _: _mpmath()),
    "get_outside_temperature_from_google": ("LONG_WEATHER_EXTENSION", dict),
}


def _isolated(method: Any) -> Callable[..., Any]:
    """`method`, with what it would share with other episodes replaced in a copy of its module's names."""
    if method.__name__ not in _STRAY:
        return method
    name, replace = _STRAY[method.__name__]
    function = method.__func__
    names = function.__globals__ | {name: replace(function.__globals__[name])}
    own = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return types.MethodType(own, method.__self__)


def _class(name: str) -> Any:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    return getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)


@functools.cache
def _documents(name: str) -> list[dict[str, Any]]:
    """Of the functions of a class."""
    import bfcl_eval
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    file = Path(bfcl_eval.__file__).parent / "data" / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def _schema(document: dict[str, Any]) -> dict[str, Any]:
    """A document as the JSON schema of a function."""
    return {"type": "function", "function": {"name": document["name"], "description": document["description"],
                                             "parameters": _standard(document["parameters"])}}


def _standard(schema: Any) -> Any:
    """A schema in JSON's own names of types. A property may itself be called `type`; its value is then a schema and no name."""
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _TYPES.get(value, value) if key == "type" and isinstance(value, str) else _standard(value) for key, value in schema.items()}
