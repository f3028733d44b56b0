"""What a generator asks of a sampling engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from rtpo_ray.types import Completion, Sampling

if TYPE_CHECKING:
    import torch


class Sampler(Protocol):
    """What an episode asks of an engine."""

    async def generate(self, context_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one response. Raises EngineError when the engine refuses or loses the request.

        The event loop may be blocked for one forward pass at a time. Cancelling the call frees the request.
        """
        ...


class Engine(Sampler, Protocol):
    """Tokens in, tokens out. All methods are called from one event loop; `generate` may run many times at once."""

    max_model_len: int  # tokens of context + response

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next sampled token uses."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight in place (Hugging Face names), drop cached prefixes, and take `version`.

        Raises EngineError when requests are open (nothing is changed then), or when a weight is missing or unknown: the engine then refuses
        to sample until a complete push succeeds.
        """
        ...

    def check(self) -> None:
        """Raise EngineError when the engine has failed for good and must be replaced."""
        ...

    def close(self) -> None:
        """Free memory and threads."""
        ...
