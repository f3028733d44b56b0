"""Answers in words: exact match, F1 of the words, and whether the right answer occurs."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rtpo_ray.rewards.answers import after_thinking, golds, text_answer
from rtpo_ray.rewards.base import Grader

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}  # no part of such an answer is worth anything: HotpotQA's rule


def words(text: str) -> list[str]:
    """The words of `text` as SQuAD compares them: lower case, without ASCII punctuation and articles. A text of articles alone keeps them, one of
    punctuation alone that."""
    plain = text.lower().translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split() or plain.split() or text.lower().split()


class _Words(Grader):
    r"""The answer is the last `<answer>...</answer>` of the response, else the last `\boxed{...}`, else the last line "Answer: ...", else,
    when `whole`, the whole response. Of several golds the best counts.

    Args:
        gold: the field with the right answer: a text, a number, or a list of which any one is right.
        whole: fall back on the whole response when it marks no answer.
    """

    instant = True

    def __init__(self, gold: str = "answer", whole: bool = True) -> None:
        super().__init__()
        self.gold, self.whole = gold, whole
        self.fields = (gold,)

    def grade(self, response: str, row: Mapping[str, Any]) -> float:
        right = [words(gold) for gold in golds(row, self.gold)]
        visible = after_thinking(response)
        answer = text_answer(visible, self.whole) if visible else None
        if not answer:
            return self.nothing("no_answer")
        found = words(answer)
        return max(self.score(found, gold) for gold in right)

    @abstractmethod
    def score(self, found: list[str], gold: list[str]) -> float:
        """What the words `found` are worth where `gold` is right."""


class Exact(_Words):
    __doc__ = f"1 when the answer has exactly the gold's words, in order.\n\n    {_Words.__doc__}"

    def score(self, found: list[str], gold: list[str]) -> float:
        return float(found == gold)


class F1(_Words):
    __doc__ = (f"F1 of the answer's words and the gold's, each as often as it occurs; yes, no and noanswer are worth 1 or 0 only.\n\n"
               f"    {_Words.__doc__}")

    def score(self, found: list[str], gold: list[str]) -> float:
        if found != gold and _CLOSED & {" ".join(found), " ".join(gold)}:
            return 0.0
        common = (Counter(found) & Counter(gold)).total()
        return 2 * common / (len(found) + len(gold))


class Hit(_Words):
    __doc__ = f"1 when the gold occurs in the answer, as whole words in a row; an answer may hedge by naming several.\n\n    {_Words.__doc__}"

    def score(self, found: list[str], gold: list[str]) -> float:
        return float(f" {' '.join(gold)} " in f" {' '.join(found)} ")
