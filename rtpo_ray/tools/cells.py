"""Cells of Python code, run one after the other like those of a notebook. Runs inside of the sandbox."""

from __future__ import annotations

import ast
import io
import linecache
import random
import sys
import traceback
import types

_FRAMES = 4  # of a traceback, the innermost ones
_SPARE = 16 << 20  # bytes that must be left after a cell


class Capture(io.TextIOBase):
    """What a cell prints, cut in the middle: takes bounded memory whatever is written.

    Args:
        limit: characters to keep, half of them from the beginning and half from the end.
    """

    encoding = "utf-8"

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self.clear()

    def clear(self) -> None:
        self._head, self._tail, self._cut = "", "", 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        room = self._half - len(self._head)
        if room > 0:
            self._head += text[:room]
        self._tail += text[max(0, room):]
        if len(self._tail) > 8 * self._half:
            self._shorten()
        return len(text)

    def text(self) -> str:
        """All that was written, with a note of what was cut."""
        if len(self._tail) > self._half:
            self._shorten()
        return self._head + (f"\n... {self._cut} characters cut ...\n" if self._cut else "") + self._tail

    def _shorten(self) -> None:
        self._cut += len(self._tail) - self._half
        self._tail = self._tail[-self._half:]


class Notebook:
    """The names that the cells share, in a `__main__` of their own; the random numbers of `random`, numpy and sympy start
    from a fixed seed.

    Args:
        limit: of a cell's output, in characters.
    """

    def __init__(self, limit: int) -> None:
        module = types.ModuleType("__main__")
        sys.modules["__main__"], self._names, self._number = module, module.__dict__, 0
        self._output = Capture(limit)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if "sympy" in sys.modules:
            sys.modules["sympy"].core.random.seed(0)

    def run(self, code: str) -> str:
        """What the cell printed, then the value of its last expression, or the traceback. Raises MemoryError when the cell did, or left too
        little memory for the next one."""
        self._number += 1
        name = f"<cell {self._number}>"
        linecache.cache[name] = (len(code), None, [f"{line}\n" for line in code.split("\n")], name)
        self._output.clear()
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = self._output  # type: ignore[assignment,misc]
        try:
            self._execute(code, name)
            bytes(_SPARE)  # not touched, so it costs nothing
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a cell raises, SystemExit included, is its result
            self._output.write(_report(error))
        return self._output.text().rstrip("\n")

    def _execute(self, code: str, name: str) -> None:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                self._output.write(repr(value))


def _report(error: BaseException) -> str:
    """The traceback from the cell on, its innermost frames."""
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames, limit=-_FRAMES))
