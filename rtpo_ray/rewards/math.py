"""Answers in mathematics, compared exactly where they are plain, and by math-verify in other processes where they are not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rtpo_ray.errors import GraderError
from rtpo_ray.rewards import pool
from rtpo_ray.rewards.answers import after_thinking, boxed, golds, hashed, math_answer
from rtpo_ray.rewards.base import Grader

LONGEST = 10_000  # characters of an answer; what is longer is none

_SPACING = re.compile(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[!,;: ]|~|\\?\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,(?:\\!\s*|\s*\\!)|\\,|\\ |~)(?=\d{3}(?!\d))")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf|textrm)\s*\{([^{}]*)\}")
_UNIT = re.compile(r" ?(?:\\(?:text|mbox|mathrm|textrm) ?\{[^{}]*\}(?: ?\^ ?(?:\d|\{\d\}))?|\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree|°)$")
_SPACE = re.compile(r"(?<!\d) (?!(?<=, )\d{3}(?!\d))| (?!\d)")  # one that tells 1 1/2 from 11/2, or 100, 200 from 100,200, stays
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(rf"([+-]?)({_DIGITS})(?:/({_DIGITS}))?(\\?%)?")
_FRACTION = re.compile(r"([+-]?)\\frac(?:\{(-?\d+)\}|(\d))(?:\{(-?\d+)\}|(\d))(\\?%)?")


class Math(Grader):
    r"""1 for the right answer and 0 for any other.

    The answer is the last `\boxed{...}`, else what follows `####`, else what follows "answer is", else the last number. Equal texts are
    right, after spaces, units and other ornaments are taken away; a gold that is all `\text{...}` is right as that text only; plain numbers,
    fractions and decimals are compared exactly, 50 % being 50 as well as 0.5. All else is asked of math-verify, which evaluates the gold and
    the answer as LaTeX: an answer that it cannot evaluate in `seconds` of processor time is worth 0 and counted as an overrun, while a gold
    that it cannot parse or evaluate is a GraderError.

    math-verify is lenient where the form of a gold does not tell what was asked for: of an equation that answers a value only the right side
    counts (`x=5` for 5, but `2=1` for 1 too), the base of 52_8 is no part of it, `(2,4)` and `2,4` are the same, the order of a list does
    not matter, and decimals are rounded to 6 places when they meet anything but a plain number.

    Args:
        gold: the field with the right answer: a text, in which `\boxed{}` or `####` is looked for first, a number, or a list of these, any
            one of which is right.
        last_number: fall back on the last number of a response that marks no answer.
        seconds: of processor time that math-verify may take for the gold, and as many for the answer.
        workers: processes of math-verify, shared by all graders of this process; the largest number asked for counts.
    """

    def __init__(self, gold: str = "answer", last_number: bool = True, seconds: float = 5.0, workers: int = 2) -> None:
        super().__init__()
        if seconds <= 0:
            raise ValueError(f"seconds is {seconds}; expected more than 0")
        if workers < 1:
            raise ValueError(f"workers is {workers}; expected at least 1")
        self.gold, self.last_number, self.seconds, self.workers = gold, last_number, seconds, workers
        self.fields = (gold,)

    def grade(self, response: str, row: Mapping[str, Any]) -> float:
        right = [_marked(gold) for gold in golds(row, self.gold)]
        visible = after_thinking(response)
        answer = math_answer(visible, self.last_number) if visible else None
        if not answer:
            return self.nothing("no_answer")
        if len(answer) > LONGEST:
            return self.nothing("too_long")
        verdicts = {gold: plainly_same(gold, answer) for gold in right}
        if any(verdicts.values()):
            return 1.0
        overrun = False
        for gold in (gold for gold, verdict in verdicts.items() if verdict is None):
            try:
                if self.same(gold, answer):
                    return 1.0
            except pool.Overrun:
                overrun = True
        return self.nothing("overrun") if overrun else 0.0

    def same(self, gold: str, answer: str) -> bool:
        """Whether math-verify takes `answer` for `gold`, both LaTeX, whatever a plain comparison would say.

        Raises GraderError when the gold cannot be parsed or evaluated or the workers fail, pool.Overrun when the answer cannot be evaluated.
        """
        return pool.shared().same(bare(gold), bare(answer), seconds=self.seconds, size=self.workers)


def plainly_same(gold: str, answer: str) -> bool | None:
    """Whether `answer` is `gold` as a text or as a plain number; None when that takes an understanding of mathematics."""
    if words := _WORDS.fullmatch(gold.strip()):
        return _word(words.group(1)) == _word(_WORDS.sub(r"\1", answer))
    left, right = normal(gold), normal(answer)
    if left == right:
        return True
    a, b = number(left), number(right)
    if a is None or b is None:
        return None
    (value, percent), (other, other_percent) = a, b
    if percent == other_percent:
        return value == other
    return value == other or (value / 100 == other if percent else value == other / 100)


def bare(text: str) -> str:
    """`text` without the dollar signs around and inside of it, thousands separators in LaTeX and a dot at the end: all that confuses
    math-verify."""
    return _THOUSANDS.sub("", re.sub(r"\\?\$", "", text)).strip().rstrip(".").strip()


def normal(text: str) -> str:
    """`text` without what does not change its meaning: spaces, dollar signs, sizes of brackets, a dot at the end, a unit at the end."""
    text = " ".join(_SPACING.sub(" ", _THOUSANDS.sub("", text)).split()).rstrip(". ")
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    return _SPACE.sub("", _UNIT.sub("", text) or text)


def number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number, decimal or fraction, and whether a percent sign follows; None when it is none of these."""
    if len(text) > 1000:  # Python refuses to convert longer ones
        return None
    if found := _PLAIN.fullmatch(text):
        sign, above, below, percent = found.groups()
        numerator, denominator = Fraction(above.replace(",", "")), Fraction((below or "1").replace(",", ""))
    elif found := _FRACTION.fullmatch(text):
        sign, *parts, percent = found.groups()
        numerator, denominator = Fraction(parts[0] or parts[1]), Fraction(parts[2] or parts[3])
    else:
        return None
    return ((-1 if sign == "-" else 1) * numerator / denominator, bool(percent)) if denominator else None


def _marked(gold: str) -> str:
    """Of a worked solution its marked answer, of another text all of it. Raises GraderError when nothing is left."""
    for find in (boxed, hashed):
        if found := find(gold):
            return found
    if not bare(gold):
        raise GraderError(f"the right answer is {gold!r}; expected mathematics")
    return gold


def _word(text: str) -> str:
    return " ".join(text.lower().strip(" .$\n").split()).removeprefix("(").removesuffix(")")
