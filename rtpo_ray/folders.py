"""Folders that one process at a time works in, and files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rtpo_ray.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """At once or not at all: a full disk or a kill leaves what was there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


@contextmanager
def alone_in(folder: Path, what: str, field: str, lock: str) -> Iterator[None]:
    """Make `folder` and keep others out of it, by the file `lock` in it. `what` it is for, and the `field` that names it, are for the ConfigError
    that is raised when it cannot be made or another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"field run.root is {str(folder.parent)!r}: a folder for the {what} cannot be made there: {error}") from error
    held = FileLock(folder / lock)
    try:
        held.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(f"field {field} is {folder.name!r}: another process works in {folder}; wait or choose another name") from error
    try:
        yield
    finally:
        held.release()
