"""An engine for tests: every response comes from a function, so a test says exactly what "the model" samples.

    engine = ScriptedEngine(lambda context_ids, sampling: [7, 8, 0])
    await engine.generate((1, 2), sampling)      # token ids (7, 8, 0), log-probabilities -0.5 each
    engine.requests                              # [((1, 2), sampling)]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rtpo_ray.errors import EngineError
from rtpo_ray.types import Completion, Sampling

if TYPE_CHECKING:
    import torch

Reply = Callable[[tuple[int, ...], Sampling], Sequence[int]]
Score = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[float]]


class ScriptedEngine:
    """Deterministic: the same requests in the same order give the same completions.

    `reply(context_ids, sampling)` gives a response; it is cut after the first stop token or at max_tokens, as a real engine
    does. `logprobs` is one number for every token or a function of (context_ids, response_ids). `failures` maps the number
    of a request (0 is the first) to what it raises. Like the real engine it refuses overlong contexts, weights while
    requests are open, and everything after `close`.
    """

    def __init__(self, reply: Reply, *, max_model_len: int = 4096, weight_version: int = 0, logprobs: float | Score = -0.5,
                 failures: Mapping[int, Exception] | None = None, weight_names: Sequence[str] | None = None) -> None:
        self.max_model_len = max_model_len
        self.requests: list[tuple[tuple[int, ...], Sampling]] = []  # refused ones are not listed
        self.loaded: list[tuple[int, tuple[str, ...]]] = []  # (version, names) of every successful push
        self._reply = reply
        self._logprobs = logprobs
        self._failures = dict(failures or {})
        self._weight_names = None if weight_names is None else frozenset(weight_names)  # None: any set of names is complete
        self._weight_version = weight_version
        self._open = 0
        self._closed = False

    @property
    def weight_version(self) -> int:
        return self._weight_version

    def check(self) -> None:
        """It never fails for good."""

    async def generate(self, context_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One scripted response, after a turn of the event loop. Raises EngineError or what `failures` says."""
        if self._closed:
            raise EngineError("the engine is closed")
        context = tuple(context_ids)
        if not context or len(context) + sampling.max_tokens > self.max_model_len:
            raise EngineError(f"context of {len(context)} tokens + max_tokens {sampling.max_tokens}; expected 1 or more tokens and at most "
                              f"max_model_len {self.max_model_len} together")
        number = len(self.requests)
        self.requests.append((context, sampling))
        self._open += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._open -= 1
        if number in self._failures:
            raise self._failures[number]
        response, finish_reason = _cut(tuple(self._reply(context, sampling)), sampling)
        logprobs = tuple(self._logprobs(context, response)) if callable(self._logprobs) else (self._logprobs,) * len(response)
        return Completion(token_ids=response, logprobs=logprobs, finish_reason=finish_reason, weight_version=self._weight_version)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Keep the names and take `version`. Raises EngineError when requests are open or names are missing or unknown."""
        if self._open:
            raise EngineError(f"weights of version {version} arrived while {self._open} requests are open; await or cancel them first")
        names = tuple(name for name, _ in tensors)
        if self._weight_names is not None and set(names) != self._weight_names:
            raise EngineError(f"weights of version {version}: missing {sorted(self._weight_names - set(names))}, "
                              f"unknown {sorted(set(names) - self._weight_names)}")
        self.loaded.append((version, names))
        self._weight_version = version

    def close(self) -> None:
        self._closed = True


def _cut(response: tuple[int, ...], sampling: Sampling) -> tuple[tuple[int, ...], str]:
    """The response up to its first stop token or max_tokens, and why it ended."""
    for position, token in enumerate(response[: sampling.max_tokens]):
        if token in sampling.stop_token_ids:
            return response[: position + 1], "stop"
    return response[: sampling.max_tokens], "length"
