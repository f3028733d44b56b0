"""LoRA: pairs of thin float32 matrices beside frozen linear layers, by peft (arXiv 2106.09685). y = x W^T + s (x A^T) B^T, s = alpha / rank.

Only the learner knows of them: engines, weight channel and exports get W + s B A under the names of the base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rtpo_ray.errors import ConfigError

_NAME = "default"  # peft's, of the one set of adapters
_PARTS = ("lora_A", "lora_B")


def target_layers(lm: Any, targets: str) -> dict[str, nn.Linear]:
    """The linear layers, by their path in `lm`, that get adapters: those that `targets` names by the last part of the path, separated by
    commas, or with "all-linear" every one except the head. Raises ConfigError."""
    head = lm.get_output_embeddings()
    linear = {name: module for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head}
    known = sorted({name.rpartition(".")[2] for name in linear})
    if targets == "all-linear":
        wanted = known
    else:
        wanted = [name.strip() for name in targets.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(f"field learner.lora_targets is {targets!r}: the model has no linear layer {', '.join(map(repr, unknown)) or 'at all'}; "
                          f"expected all-linear, or some of {', '.join(known) or 'none'} (the head takes no adapter), separated by commas")
    return {name: module for name, module in linear.items() if name.rpartition(".")[2] in wanted}


def add_adapters(lm: Any, *, rank: int, alpha: float, targets: str, seed: int) -> None:
    """Freeze `lm`, which lies on the CPU, and give the targets adapters, in place. B begins at 0; A is the same for the same seed."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = target_layers(lm, targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers), bias="none"), lm, adapter_name=_NAME)


def base_parameters(lm: Any) -> Iterator[tuple[str, Tensor, nn.Module | None]]:
    """(name in the base model, parameter, the peft layer whose adapters change it or None), tied weights once."""
    modules = dict(lm.named_modules())
    for name, parameter in lm.named_parameters():
        owner, _, leaf = name.partition(".base_layer.")
        if leaf:
            yield f"{owner}.{leaf}", parameter, modules[owner] if leaf == "weight" else None
        elif not any(f".{part}." in name for part in _PARTS):
            yield name, parameter, None


def adapter(layer: Any) -> tuple[Tensor, Tensor, float]:
    """A [rank, in], B [out, rank] and the scale of a peft layer."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight, layer.scaling[_NAME]


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A [out, in]; W itself, to the bit, where B A is 0."""
    change = scale * (b @ a)
    return torch.where(change == 0, weight, weight + change)  # -0.0 + 0.0 would be 0.0


@contextmanager
def without_adapters(lm: Any) -> Iterator[None]:
    """A block in which the layers compute what they did before they had adapters."""
    layers: list[Any] = [module for module in lm.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would also change requires_grad, which FSDP2 has read already
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
