"""The index behind the search tool: built once for a corpus and its options, then mapped into memory by every process.

A folder of the cache holds bm25s's arrays of scores, the passages as lines of JSON, and where each line and each word is.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from filelock import FileLock, Timeout

from rtpo_ray.data import read_rows
from rtpo_ray.errors import DataError

_LAYOUT = 1  # of an index; another one is built anew
_PATIENCE = 3600.0  # seconds to wait for another process that builds the same index
_STOP = frozenset(STOPWORDS_EN)
_WORD = re.compile(r"\w+")

Options = tuple[str, str, int, bool, float, float]  # title, text, title_weight, english, k1, b; see `search.Search`


def open_index(corpus: str, cache: str, options: Options) -> Index:
    """The index of the file `corpus`, built when the folder `cache` lacks it; one a process. Raises ValueError as `Search` does."""
    path = Path(corpus).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"corpus is {corpus!r}: no such file in {Path.cwd()}; expected a .jsonl or .parquet file of passages")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"corpus is {corpus!r}; expected a .jsonl or .parquet file")
    status = path.stat()
    return _open(path.resolve(), Path(cache).expanduser(), options, status.st_size, status.st_mtime_ns)


def words(text: str, *, english: bool) -> list[str]:
    """The words that a text is found by: without case and accents, and for English without stop words and plural endings."""
    if not text.isascii():
        text = "".join(character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character))
    found = _WORD.findall(text.lower())
    return [_singular(word) for word in found if word not in _STOP] if english else found


class Index:
    """A folder of the cache, mapped into memory: what it costs a process is the page cache's, shared with every other process."""

    def __init__(self, folder: Path) -> None:
        self._scores = bm25s.BM25.load(folder, mmap=True, load_vocab=False)
        self._hashes, self._ids, self._ends = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "ids", "ends"))
        self._lines = np.memmap(folder / "passages.jsonl", dtype=np.uint8, mode="r")

    def best(self, query: Sequence[str], top: int) -> list[tuple[str, str]]:
        """(title, text) of the `top` best passages with a word of the query, the best first; equally good ones in the corpus's order."""
        known = [found for word in dict.fromkeys(query) if (found := self._id(word)) is not None]
        if not known:
            return []
        scores = self._scores.get_scores_from_ids(known)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > top:
            least = np.partition(scores[hits], len(hits) - top)[len(hits) - top]
            hits = hits[scores[hits] >= least]
        order = np.argsort(-scores[hits], kind="stable")[:top]
        return [self._passage(int(position)) for position in hits[order]]

    def _id(self, word: str) -> int | None:
        wanted = _hash(word)
        at = int(np.searchsorted(self._hashes, wanted))
        return int(self._ids[at]) if at < len(self._hashes) and self._hashes[at] == wanted else None

    def _passage(self, position: int) -> tuple[str, str]:
        start = int(self._ends[position - 1]) if position else 0
        title, text = json.loads(self._lines[start:int(self._ends[position])].tobytes())
        return title, text


@functools.lru_cache(maxsize=8)
def _open(path: Path, cache: Path, options: Options, size: int, modified: int) -> Index:
    """`size` in bytes and time of modification in ns tell a changed file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16))
    digest.update(repr((_LAYOUT, bm25s.__version__, path.suffix, options)).encode())
    folder = cache / digest.hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache / f"{folder.name}.lock", timeout=_PATIENCE):
            if not folder.exists():
                part = cache / f"{folder.name}.part"  # whole or not there: a build that was cut short leaves only this
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                _build(path, part, options)
                part.rename(folder)
    except Timeout as error:
        raise TimeoutError(f"corpus is {str(path)!r}: another process has been building its index in {cache} for {_PATIENCE:g} s") from error
    return Index(folder)


def _build(path: Path, folder: Path, options: Options) -> None:
    title_field, text_field, title_weight, english, k1, b = options
    ids: dict[str, int] = {}
    passages: list[array[int]] = []
    ends: list[int] = []
    with (folder / "passages.jsonl").open("wb") as lines:
        for title, text in _passages(path, title_field, text_field):
            lines.write(json.dumps([title, text], ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            ends.append(lines.tell())
            found = words(title, english=english) * title_weight + words(text, english=english)
            passages.append(array("i", [ids.setdefault(word, len(ids)) for word in found]))
    if not ids:
        raise ValueError(f"corpus is {str(path)!r}: {'no passage has a word' if passages else 'the file is empty'}; expected passages to search")
    scores = bm25s.BM25(k1=k1, b=b)
    scores.index((passages, ids), create_empty_token=False, show_progress=False)
    scores.vocab_dict = {}  # a dictionary of every word would be every process's own; the hashes are mapped
    scores.save(folder, show_progress=False)
    hashes = np.array([_hash(word) for word in ids], dtype=np.uint64)
    order = np.argsort(hashes)
    np.save(folder / "hashes.npy", hashes[order])
    np.save(folder / "ids.npy", order.astype(np.int32))
    np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))


def _passages(path: Path, title_field: str, text_field: str) -> Iterator[tuple[str, str]]:
    fields = [name for name in (title_field, text_field) if name]
    for number, row in enumerate(_parquet_rows(path, fields) if path.suffix == ".parquet" else _jsonl_rows(path), start=1):
        _check_fields(path, row, fields, f"passage {number}")
        values = [row[name] if row[name] is not None else "" for name in fields]
        for name, value in zip(fields, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"corpus is {str(path)!r}: field {name!r} of passage {number} is of type {type(value).__name__}; expected text")
        yield (values[0], values[1]) if title_field else ("", values[0])


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from read_rows(str(path))
    except DataError as error:
        raise ValueError(f"corpus is {str(path)!r}: {error}") from error


def _parquet_rows(path: Path, fields: list[str]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_fields(path, file.schema_arrow.names, fields, "the file")
        for batch in file.iter_batches(columns=fields):
            yield from batch.to_pylist()


def _check_fields(path: Path, there: Iterable[str], wanted: list[str], where: str) -> None:
    for name in wanted:
        if name not in there:
            raise ValueError(f"corpus is {str(path)!r}: {where} has no field {name!r}; it has {', '.join(there) or 'none'}")


def _singular(word: str) -> str:
    if len(word) <= 3 or not word.endswith("s") or word.endswith("ss"):
        return word
    return word[:-3] + "y" if word.endswith("ies") else word[:-1]


def _hash(word: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little"))
