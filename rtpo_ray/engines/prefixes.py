"""What a prefix cache could have answered: the blocks of tokens that requests of the same weights had in common."""

from __future__ import annotations

from collections.abc import Sequence


class Prefixes:
    """Every whole block that was computed, known by the hash of its tokens and of all before them.

    Nothing is ever evicted here, so the difference to what a cache answered is what the cache lost.

        prefixes = Prefixes(block=2)
        prefixes.add([1, 2, 3, 4, 5])
        prefixes.shareable([1, 2, 3, 4])      # 2: the last token of a prompt is always computed
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._seen: set[int] = set()

    def shareable(self, prompt_ids: Sequence[int]) -> int:
        """Leading tokens of the prompt [C], in whole blocks and at most C - 1, that were computed before."""
        found = 0
        for key in self._keys(prompt_ids[:-1]):
            if key not in self._seen:
                break
            found += self._block
        return found

    def add(self, token_ids: Sequence[int]) -> None:
        """They were computed. The last token of a response never is: nobody needs what follows it."""
        self._seen.update(self._keys(token_ids))

    def clear(self) -> None:
        """The weights are others now."""
        self._seen.clear()

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        key, keys = 0, []
        for start in range(0, len(token_ids) - self._block + 1, self._block):
            key = hash((key, *token_ids[start:start + self._block]))
            keys.append(key)
        return keys
