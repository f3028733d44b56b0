"""Classes of the user's own, named by file and class: `my_method.py:MyMethod`."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any


def load_class(name: str, base: type) -> type[Any]:
    """The class of `file.py:Class`, an heir of `base`. Raises ValueError when there is none."""
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{name!r}; expected file.py:Class")
    if not Path(path).is_file():
        raise ValueError(f"{name!r}: no file {path} in {Path.cwd()}")
    try:
        module = _load(str(Path(path).resolve()), base.__name__.lower())
    except (Exception, SystemExit) as error:  # a user's file may raise anything; the cause is chained
        raise ValueError(f"{name!r}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{name!r}: {path} defines no class {attribute} that extends {base.__module__}.{base.__name__}")
    return found


def source_of(name: str) -> bytes:
    """What the file of `file.py:Class` holds; nothing when `name` is no such name."""
    file, _, attribute = name.rpartition(":")
    return Path(file).read_bytes() if attribute.isidentifier() and file.endswith(".py") and Path(file).is_file() else b""


def _name(path: Path) -> str:
    """Of a module, out of where its file lies in the working directory, of which every process of a run has its own copy."""
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
    return re.sub(r"\W", "_", str(inside.with_suffix("")))


@functools.cache
def _load(path: str, kind: str) -> Any:
    """The module in the file `path`; every process loads it for itself, and finds it by a name that does not say where the file is."""
    spec = importlib.util.spec_from_file_location(f"rtpo_ray_{kind}_{_name(Path(path))}", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]  # half a module must not be found later
        raise
    return module
