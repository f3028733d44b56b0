"""What environments made of other projects' packages share: optional imports, state hashes of any object, and global randomness."""

from __future__ import annotations

import collections
import hashlib
import importlib
import json
import pickle
import random
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TEXTS = (str, bytes, int, float, complex)  # heirs of these say what they hold
_NAMED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)  # code is no state
_PATIENCE = 60.0  # seconds that one episode waits for another to let the global generators go
_GLOBAL = threading.Lock()  # of the global generators: environments run in threads, and there is one state of each for all of them


def optional(module: str, install: str) -> Any:
    """The module of an optional package. Raises ValueError with what to `install` when it, or what it needs, is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported ({error}); install it with: pip install {install}") from error


def state_hash(state: Any, without: tuple[str, ...] = ()) -> str:
    """Hash of any object: equal states give equal hashes in every process, whatever the order of insertion and however objects refer to
    each other. Attributes named in `without` are left out."""
    return hashlib.blake2b(json.dumps(_plain(state, without, {})).encode(), digest_size=8).hexdigest()


def _plain(value: Any, without: tuple[str, ...], seen: dict[int, Any]) -> Any:
    """`value` as JSON. An object met again, as the parent of its child is, becomes its number."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, _TEXTS):
        return repr(value)
    if isinstance(value, _NAMED):
        return {"name": getattr(value, "__qualname__", value.__name__)}
    if isinstance(value, dict):
        return {"dict": [[repr(key), _plain(value[key], without, seen)] for key in sorted(value, key=repr)]}
    if isinstance(value, (list, tuple, collections.deque)):
        return [_plain(item, without, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(repr, value))}
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if not hasattr(value, "__dict__"):
        return {type(value).__qualname__: hashlib.blake2b(pickle.dumps(value), digest_size=8).hexdigest()}
    if id(value) in seen:
        return {"again": seen[id(value)][0]}
    seen[id(value)] = (len(seen), value)  # the object too: a freed one's id would be given away again
    return {type(value).__qualname__: _plain({name: item for name, item in vars(value).items() if name not in without}, without, seen)}


class GlobalRandom:
    """One episode's state of the global generators of `random` and `numpy.random`, for packages that draw from them.

    Its attributes are plain values: it can be pickled, and belongs into an environment's snapshot and hash.
    """

    def __init__(self, seed: int) -> None:
        import numpy

        self.python = random.Random(seed).getstate()
        self.numpy = _listed(numpy.random.RandomState(seed % 2**32).get_state(legacy=True))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the global generators go on from this state, and give them back as they were. Raises TimeoutError when another episode keeps
        them for a minute."""
        import numpy

        if not _GLOBAL.acquire(timeout=_PATIENCE):
            raise TimeoutError(f"another episode has kept the global random generators for {_PATIENCE:g} s: a step of its environment hangs")
        try:
            before = random.getstate(), numpy.random.get_state(legacy=True)
            random.setstate(self.python)
            numpy.random.set_state(self.numpy)
            try:
                yield
            finally:
                self.python, self.numpy = random.getstate(), _listed(numpy.random.get_state(legacy=True))
                random.setstate(before[0])
                numpy.random.set_state(before[1])
        finally:
            _GLOBAL.release()


def _listed(state: Any) -> tuple[Any, ...]:
    """A state of numpy's generator with its key as a list, which has the same text and pickle everywhere."""
    return (state[0], state[1].tolist(), *state[2:])
