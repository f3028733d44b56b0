"""Full-text search over a corpus of passages, ranked by BM25."""

from __future__ import annotations

from typing import Any

from rtpo_ray.tools.base import ToolError, Toolset, tool


class Search(Toolset):
    """One tool, `search`. The index of a corpus is built once, kept in a folder that processes share, and mapped into memory, so that every
    process of a machine searches the same pages. The state is the options.

    Args:
        corpus: file of passages, .jsonl (an object a line) or .parquet.
        top: passages that a search returns at most.
        chars: of one passage that are shown.
        title: field of the passage's title; empty when there is none.
        text: field of its text.
        title_weight: how often a word of the title counts, against one of the text.
        english: leave English stop words out and count a plural as its singular, in the corpus and in queries.
        k1: how much a word's repetition in a passage counts, BM25's parameter.
        b: how much a passage's length counts, BM25's parameter.
        cache: folder of the indexes.

    Raises ValueError, naming the field, when an option is impossible or the corpus is absent, empty or lacks a field.
    """

    _opened: Any = None  # the index, which no state holds

    def __init__(self, corpus: str, top: int = 3, chars: int = 500, title: str = "title", text: str = "text", title_weight: int = 2,
                 english: bool = True, k1: float = 1.5, b: float = 0.75, cache: str = "~/.cache/rtpo_ray/search") -> None:
        for name, value in {"top": top, "chars": chars, "title_weight": title_weight}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if k1 < 0:
            raise ValueError(f"k1 is {k1}; expected at least 0")
        if not 0 <= b <= 1:
            raise ValueError(f"b is {b}; expected 0 to 1")
        if not text:
            raise ValueError("text is empty; expected the field of the passages' text")
        self.corpus, self.top, self.chars, self.cache = corpus, top, chars, cache
        self.index_options = (title, text, title_weight, english, float(k1), float(b))
        self._index()  # what is wrong with the corpus is said here, not in the middle of an episode

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    @tool
    def search(self, query: str) -> str:
        """Search the library for passages about a topic, the most relevant first.

        Args:
            query: words to look for
        """
        from rtpo_ray.tools.search_index import words

        if not query.strip():
            raise ToolError("the query is empty")
        found = self._index().best(words(query, english=self.index_options[3]), self.top)
        if not found:
            return f"nothing was found for {query[:self.chars]!r}"
        return "\n".join(f"[{rank}] {self._show(title, text)}" for rank, (title, text) in enumerate(found, start=1))

    def _show(self, title: str, text: str) -> str:
        passage = " ".join((f"{title}: {text}" if title else text).split())
        return passage if len(passage) <= self.chars else passage[:self.chars].rstrip() + " ..."

    def _index(self) -> Any:
        from rtpo_ray.tools.search_index import open_index

        if self._opened is None:
            self._opened = open_index(self.corpus, self.cache, self.index_options)
        return self._opened
