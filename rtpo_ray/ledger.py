"""The ledger: what of a run is done, in SQLite. The coordinator writes it; whoever resumes or reports reads it.

    steps:  seq | progress after it | event of it        one transaction a step, on disk when `append` returns

A run goes on from the last step whose learner state is on disk and whose weights the generators had; what came after is forgotten
and done again. Whether a state is on disk is decided by its folder alone, which appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rtpo_ray.errors import RtpoError

Event = dict[str, Any]

FILE = "ledger.sqlite"
SCHEMA = 1  # user_version of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands: all that decides what comes next, beside the learner's state."""

    sweep: int = 0  # the sweep under way
    stage: int = -1  # how many of its stages are done; -1: its trunks are not collected
    tokens: int = 0  # generated in training
    updates: int = 0  # updates that changed the learner; names its state
    version: int = 0  # weight version that the generators were brought to last
    unpublished: bool = False  # whether the learner is ahead of that version
    evaluated: int = -1  # sweeps done at the last evaluation; -1: none yet
    evaluated_tokens: int = 0  # and tokens
    finished: bool = False


class Ledger:
    """Args:
    folder: of the run. The file is made when there is none.
    read_only: for who only looks; the folder may then be one that cannot be written to.
    Raises RtpoError when the file is no ledger that this version reads.
    """

    def __init__(self, folder: str | Path, read_only: bool = False) -> None:
        self._folder = Path(folder)
        path = self._folder / FILE
        mode = "ro" if read_only else "rwc"
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=30, isolation_level=None)
        try:
            self._db.execute("PRAGMA synchronous=FULL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, SCHEMA):
                raise RtpoError(f"{path} was written by another version of rtpo-ray (its schema is {found}; expected {SCHEMA})")
            if read_only:
                return
            self._db.execute("CREATE TABLE IF NOT EXISTS steps (seq INTEGER PRIMARY KEY, progress TEXT NOT NULL, event TEXT)")
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
        except sqlite3.DatabaseError as error:
            raise RtpoError(f"{path} is not readable as a ledger: {error}") from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def append(self, progress: Progress, event: Event | None = None) -> Event:
        """One finished step; returns its event, with the time."""
        event = {**event, "time": time.time()} if event else {}
        kept = json.dumps(event, allow_nan=False) if event else None
        self._db.execute("INSERT INTO steps (progress, event) VALUES (?, ?)", (json.dumps(dataclasses.asdict(progress)), kept))
        return event

    @property
    def progress(self) -> Progress:
        """After the last step."""
        row = self._db.execute("SELECT progress FROM steps ORDER BY seq DESC LIMIT 1").fetchone()
        return Progress(**json.loads(row[0])) if row else Progress()

    @property
    def resume_point(self) -> Progress:
        """Where the run would go on."""
        return self._resume_point()[1]

    def rewind(self) -> tuple[Progress, int]:
        """Forget what cannot be built upon: (where the run stands then, number of events forgotten). The states of what is forgotten go too: an
        update that is made again must not be taken for written before it is."""
        keep, progress = self._resume_point()
        for folder in self._folders("states", "update"):
            if _number(folder) > progress.updates:
                shutil.rmtree(folder)
        forgotten: int = self._db.execute("SELECT count(*) FROM steps WHERE seq > ? AND event IS NOT NULL", (keep,)).fetchone()[0]
        self._db.execute("DELETE FROM steps WHERE seq > ?", (keep,))
        return progress, forgotten

    def prune(self, keep_states: int) -> None:
        """Remove learner states but the last `keep_states`, and trunks of past sweeps. What a resumed run would begin with stays."""
        needed = self.resume_point
        old = [folder for folder in self._folders("states", "update")[:-keep_states] if _number(folder) < needed.updates]
        for folder in [*old, *(folder for folder in self._folders("trunks", "sweep") if _number(folder) < needed.sweep)]:
            shutil.rmtree(folder, ignore_errors=True)  # what is left is tried again at the next step

    def events(self) -> list[Event]:
        """Of all steps, in order."""
        return [json.loads(text) for (text,) in self._db.execute("SELECT event FROM steps WHERE event IS NOT NULL ORDER BY seq")]

    def close(self) -> None:
        self._db.close()

    def _resume_point(self) -> tuple[int, Progress]:
        """The last step that can be built upon: (its number, progress after it); (0, the beginning) when there is none."""
        for seq, text in self._db.execute("SELECT seq, progress FROM steps ORDER BY seq DESC"):
            progress = Progress(**json.loads(text))
            if not progress.unpublished and self._on_disk(progress):
                return seq, progress
        return 0, Progress()

    def _folders(self, kind: str, name: str) -> list[Path]:
        return sorted(self._folder.glob(f"{kind}/{name}-" + "[0-9]" * 6))

    def _on_disk(self, progress: Progress) -> bool:
        """Whether the learner's state is, and the trunks of a sweep under way."""
        return ((not progress.updates or state_folder(self._folder, progress.updates).is_dir())
                and (progress.stage < 0 or trunks_folder(self._folder, progress.sweep).is_dir()))


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def state_folder(folder: str | Path, updates: int) -> Path:
    """Of the learner's state after so many updates."""
    return Path(folder) / "states" / f"update-{updates:06d}"


def trunks_folder(folder: str | Path, sweep: int) -> Path:
    """Of the trunks of a sweep under way."""
    return Path(folder) / "trunks" / f"sweep-{sweep:06d}"
