"""The Python tool: a notebook whose cells the model writes, in a sandbox."""

from __future__ import annotations

import re
from typing import Any

from rtpo_ray.tools.base import ToolError, Toolset, tool
from rtpo_ray.tools.sandbox import Session, SessionEnded

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of objects; another process has others


class Python(Toolset):
    """One notebook an episode. Its state is the cells so far with their outputs; a copy runs them again before its first call, and so does the
    call after one that killed the session. Each cell must then give the same output: `random`,
    numpy and sympy start from a fixed seed, and hashes are the same in every process. What a cell raises is part of its output.

    Code can import the standard library, and numpy and sympy where they are installed. It reads no other file, writes none, and
    reaches no network and no other process.

    Args:
        seconds: of wall-clock time that a call may take; then it is stopped. Cells that are run again have as long each.
        memory: MiB that a session may take beyond the loaded packages.
        output: characters of a call's output; the middle of a longer one is cut.
        isolation: "require" refuses to run where a layer of the sandbox is missing that it needs, "best-effort" runs with those that the machine
            has (`rtpo_ray.tools.sandbox.layers` names them).
    """

    def __init__(self, seconds: float = 10.0, memory: int = 512, output: int = 8000, isolation: str = "require") -> None:
        if not 0 < seconds < 86400:
            raise ValueError(f"seconds is {seconds}; expected more than 0 and less than a day")
        if memory < 32:
            raise ValueError(f"memory is {memory}; expected at least 32 (MiB)")
        if output < 2:
            raise ValueError(f"output is {output}; expected at least 2 (characters)")
        if isolation not in ("require", "best-effort"):
            raise ValueError(f"isolation is {isolation!r}; expected 'require' or 'best-effort'")
        self.seconds, self.memory, self.output, self.isolation = seconds, memory, output, isolation
        self.longest_wait = seconds
        self.cells: list[tuple[str, str]] = []  # (code, output) of the calls so far, but for those that killed their session
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _session=None)

    @tool
    def python(self, code: str) -> str:
        """Run Python code, as a cell of a notebook: names stay from call to call. Returns what it prints and the value of its last expression.

        Args:
            code: the code; numpy and sympy can be imported
        """
        session = self._session = self._session or self._replayed()
        try:
            output = session.run(code, self.seconds)
        except SessionEnded as ended:
            self._session = None
            raise ToolError(f"{ended}; this code has no effect, the names from before it are kept") from ended
        self.cells.append((code, output))
        return output or "(no output)"

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _replayed(self) -> Session:
        """A new session with the state of all cells. Raises RuntimeError when one of them does not do again what it did."""
        session = Session(self.memory, self.output, self.isolation)
        for number, (code, output) in enumerate(self.cells, 1):
            try:
                again = session.run(code, self.seconds)
            except SessionEnded as ended:
                raise RuntimeError(f"cell {number} of {len(self.cells)} ran before and does not run again: {ended}") from ended
            if _ADDRESS.sub("", again) != _ADDRESS.sub("", output):
                session.close()
                raise RuntimeError(f"cell {number} of {len(self.cells)} is not deterministic: it gave {output[:200]!r}, and {again[:200]!r} when "
                                   "it was run again; its output may depend on time, on randomness without a seed or on addresses")
        return session
