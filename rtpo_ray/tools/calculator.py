"""A calculator: expressions over numbers, and variables that stay for the episode."""

from __future__ import annotations

import atexit
import functools
import math
import os
import re
from typing import Any

from rtpo_ray.tools.base import ToolError, Toolset, tool

FUNCTIONS = ("sqrt", "cbrt", "isqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh",
             "degrees", "radians", "hypot", "floor", "ceil", "trunc", "factorial", "gcd", "lcm", "comb", "perm", "prod")
CONSTANTS: dict[str, Any] = {"pi": math.pi, "e": math.e}
LONGEST = 1000  # characters of an expression, and of a printed result
VARIABLES = 100  # that an episode may set
_MEMORY = 4_000_000  # bytes of one call's values
_MESSAGE = 200  # characters of an error
_PATIENCE = 30.0  # seconds that a call waits for a free interpreter before the rollout is given up
_PRELUDE = f"from math import {', '.join(FUNCTIONS)}\nln = log\n"
_RESERVED = {*FUNCTIONS, "ln"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)(.*)")
_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\w,])")
_MODULE = re.compile(r"\bmath\.")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", "π": "pi"})


class Calculator(Toolset):
    """One tool, `calculate`. Expressions run in an interpreter of a Python subset, in a process of its own that all calculators of this
    process share; it reaches no file, network or clock. The state is the variables.

    Args:
        seconds: that one call may compute; what takes longer is an error that the model reads.
    """

    def __init__(self, seconds: float = 0.5) -> None:
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds is {seconds}; expected more than 0")
        self.seconds = seconds
        self.variables: dict[str, Any] = {}

    @tool
    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression, such as 12 * (3 + 4) ^ 2 or sqrt(2) * pi. A line like x = 3 / 7 keeps the value for later calls.

        Args:
            expression: numbers, + - * / // % ^, comparisons, lists, and functions such as sqrt, log, ln, sin, factorial, gcd, comb, min, max, sum
        """
        if len(expression) > LONGEST:
            raise ToolError(f"the expression has {len(expression)} characters; at most {LONGEST} are allowed")
        lines = [line.strip() for line in re.split(r"[;\n]", expression) if line.strip()]
        if not lines:
            raise ToolError("the expression is empty")
        variables = dict(self.variables)  # kept only when every line has worked
        for name, source in map(_parse, lines):
            value = self._evaluate(source, variables)
            shown = _show(value)
            if name:
                variables[name] = value
        if len(variables) > VARIABLES:
            raise ToolError(f"{len(variables)} variables; at most {VARIABLES} are allowed")
        self.variables = variables
        return shown

    def _evaluate(self, source: str, variables: dict[str, Any]) -> Any:
        from pydantic_monty import MontyCrashedError, MontyError

        limits = {"max_feed_duration_secs": self.seconds, "max_memory": _MEMORY, "max_recursion_depth": 100}
        session = _pool(os.getpid()).checkout(limits=limits, os_policy={"sleep": "zero"})
        try:
            with session as interpreter:
                return interpreter.feed_run(_PRELUDE + source, inputs=CONSTANTS | variables, print_callback=_ignore)
        except MontyCrashedError as error:
            if not error.timed_out:
                raise  # the interpreter died, which is not the expression's fault
            raise ToolError(f"took longer than {self.seconds:g} s") from error
        except MontyError as error:
            raise ToolError(self._explain(error.exception())) from error

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return "a value is too large"
        if isinstance(error, TimeoutError):
            return f"took longer than {self.seconds:g} s"
        return f"{type(error).__name__}: {error}"[:_MESSAGE]


def _parse(line: str) -> tuple[str, str]:
    """(the variable that a line sets or nothing, its expression as Python)."""
    text = line.translate(_SPELLINGS)
    assignment = _ASSIGNMENT.fullmatch(text)
    name, text = assignment.groups() if assignment else ("", text)
    if not text.strip():
        raise ToolError(f"{name} is set to nothing; write {name} = 3 / 7")
    if name in _RESERVED:
        raise ToolError(f"{name} is a function; choose another name for the variable")
    text = _THOUSANDS.sub(lambda found: found[0] if _separates(text[:found.start()]) else found[0].replace(",", ""), text)
    return name, f"({_MODULE.sub('', text)}\n)"


def _separates(before: str) -> bool:
    """Whether a comma behind `before` stands between arguments or elements, so that it is no thousands separator."""
    inside: list[bool] = []
    for position, character in enumerate(before):
        if character in "([{":
            inside.append(character != "(" or re.search(r"\w\s*$", before[:position]) is not None)
        elif character in ")]}" and inside:
            inside.pop()
    return any(inside)


def _show(value: Any) -> str:
    """A number with 12 significant digits, an integer exactly; a flat list or tuple of them. Raises ToolError for anything else."""
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(_number, value)).join("[]" if isinstance(value, list) else "()")
    else:
        shown = _number(value)
    if len(shown) > LONGEST:
        raise ToolError(f"the result has more than {LONGEST} characters")
    return shown


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > LONGEST * math.log2(10):
            raise ToolError(f"the result has about {int(value.bit_length() / math.log2(10))} digits; at most {LONGEST} are shown")
        return str(value)
    if not isinstance(value, float):
        raise ToolError(f"the result is of type {type(value).__name__}; expected a number")
    if not math.isfinite(value):
        raise ToolError(f"the result is {value}; expected a finite number")
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def _ignore(stream: str, text: str) -> None:
    """What an expression prints goes nowhere."""


@functools.cache
def _pool(process: int) -> Any:
    """The interpreters of this process; `process` is its id, because a fork shares none."""
    from pydantic_monty import Monty

    pool = Monty(min_processes=1, checkout_timeout=_PATIENCE).__enter__()
    atexit.register(pool.__exit__, None, None, None)
    return pool
