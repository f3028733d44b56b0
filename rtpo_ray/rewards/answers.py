"""Where the answer is: in the response of a model, and in a row of data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rtpo_ray.errors import GraderError

_NUMBER = re.compile(r"(?:(?<![\w)}])-)?(?:\\[dt]?frac\{\d+\}\{\d+\}|\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?(?:/\d+)?|\.\d+)(?:\s*\\?%)?")
_STATED = re.compile(r"\banswer(?:\s+is|\s*:)[ \t:*]*([^\n]+)", re.IGNORECASE)
_ADVERB = re.compile(r"^(?:(?:therefore|thus|hence|so|then|simply|clearly|indeed|just|exactly|equal to)\b[ ,:]*)+", re.IGNORECASE)
_HEADING = re.compile(r"[*_ ]*[A-Za-z][A-Za-z'-]{2,}[*_:.]*(?: .*)?")  # such as "Step 2: add" or "Final answer"
_SENTENCE_END = re.compile(r"\.(?:\s|$)|,?\s+(?:because|since)\b")
_AMOUNT = re.compile(rf"(?:\\?\$|€|£)?\s*({_NUMBER.pattern})(?:\s+(?!(?:sin|cos|tan|log|exp)\b)[A-Za-z]{{3}}[A-Za-z ]*)?")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_LINE = re.compile(r"^[ \t*#]*(?:final )?answer[ \t]*:[ \t*]*([^\n]+)", re.IGNORECASE | re.MULTILINE)


def after_thinking(response: str) -> str | None:
    """What comes after the last `</think>`; None while the model still thinks, or when it thought and said nothing after it."""
    visible = response.rpartition("</think>")[2]
    return visible.strip() or None if "<think>" not in visible else None


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox{...}`) that is closed and not empty; None without one."""
    opened: list[int] = []  # where the content begins of the boxes and, as -1, other braces that are open
    start, content = -1, None
    for brace in re.finditer(r"\\f?boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if brace.group()[-1] == "{" and brace.group() != "\\{":
            opened.append(brace.end() if len(brace.group()) > 1 else -1)
        elif brace.group() == "}" and opened and (begin := opened.pop()) > start and (inner := text[begin:brace.start()].strip()):
            start, content = begin, inner
    return content


def math_answer(text: str, last_number: bool) -> str | None:
    r"""The answer to a mathematical question: the last `\boxed{}`, else what follows the last `####`, unless that is a heading, else the last
    "answer is", else, when `last_number`, the last number, else the heading; None without any of these."""
    if found := boxed(text):
        return found
    found = hashed(text)
    if found is not None and not _HEADING.fullmatch(found):
        return found
    if stated := _STATED.findall(text):
        return _phrase(_ADVERB.sub("", stated[-1]))
    numbers = _NUMBER.findall(text if found is None else text.rpartition("####")[2]) if last_number else []
    return numbers[-1] if numbers else found


def hashed(text: str) -> str | None:
    """What follows the last `####`, on the same line; None without it."""
    _, mark, rest = text.rpartition("####")
    return _phrase(rest.strip().partition("\n")[0]) if mark and rest.strip() else None


def text_answer(text: str, whole: bool) -> str | None:
    r"""The answer to a question in words: the last `<answer>...</answer>`, else the last `\boxed{}`, else the last line "Answer: ...",
    else, when `whole`, the whole text; None without any of these."""
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1]).strip()
    if (found := boxed(text)) is not None:
        return re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", found)
    if lines := _LINE.findall(text):
        return str(lines[-1]).strip(" \t*")
    return text if whole else None


def golds(row: Mapping[str, Any], field: str) -> list[str]:
    """The right answers in `row[field]`, which holds a text, a number or a list of these, any one of which is right. Raises GraderError when
    there is none."""
    if field not in row:
        raise GraderError(f"the task's row has no field {field!r}; it has {', '.join(row)}")
    value = row[field].tolist() if hasattr(row[field], "tolist") else row[field]
    found = [_written(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    if not found or "" in found:
        raise GraderError(f"the row's field {field!r} is {value!r}; expected a text, a number or a list of these, none empty")
    return found


def _written(value: Any) -> str:
    """The text of one right answer; empty when it is none."""
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")  # never 1e-07
    return str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _phrase(text: str) -> str:
    """An answer inside of a sentence: to the sentence's end, and of an amount with its unit in plain words the number only."""
    text = _SENTENCE_END.split(text, maxsplit=1)[0].strip(" \t*_")
    text = re.sub(r"\\[()\[\]]|(?<!\\)\$", "", text) if "\\(" in text or "\\[" in text or text.count("$") > 1 else text
    amount = _AMOUNT.fullmatch(text.strip())
    return amount.group(1) if amount else text.strip()
