"""What training and sampling with a model take, before any of it is there: from config.json alone, no weights, no GPU.

Parameters are counted on the model itself, built of tensors without storage; so are the activations, by running its forward pass on such
tensors and adding up what autograd keeps. The rest is arithmetic (`rank_memory`). All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AutoModelForCausalLM

from rtpo_ray.policy import lora
from rtpo_ray.policy.modeling import LOGITS_BYTES, layers_of

if TYPE_CHECKING:
    from rtpo_ray.config import LearnerConfig

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Numbers of parameters, and the shapes that memory depends on."""

    parameters: int  # of the model as engines have it
    held: int  # by the learner: adapters too
    trained: int  # all of them, or those of the adapters
    layer: int  # of the largest transformer layer, adapters included: what FSDP2 gathers at once
    root: int  # outside of the layers: embeddings, last norm, head
    root_trained: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    longest: int  # positions that the model knows; 0: any number

    def kv_bytes(self, dtype: str) -> int:
        """Of one token: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What one forward pass keeps for the backward pass."""

    layers: int  # all layers together
    layer: int  # the largest one
    inputs: int  # the layers' inputs alone
    widest: int  # the largest tensor that is kept of a layer
    rest: int  # last norm and so on, without the logits


def blueprint(config: Any, learner: LearnerConfig, dtype: str) -> Any:
    """The causal LM of a transformers configuration, with its adapters, of tensors that have a shape and no numbers.

    Raises ConfigError when learner.lora_targets names no linear layer.
    """
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="counted").eval()
        if learner.lora_rank:
            lora.add_adapters(lm, rank=learner.lora_rank, alpha=learner.lora_alpha, targets=learner.lora_targets, seed=0)
        return lm.to(getattr(torch, dtype))


def size_of(lm: Any) -> ModelSize:
    """Of a blueprint."""
    text = lm.config.get_text_config()
    inside = {id(parameter) for layer in layers_of(lm) for parameter in layer.parameters()}
    root = [parameter for parameter in lm.parameters() if id(parameter) not in inside]
    return ModelSize(
        parameters=_count(parameter for _, parameter, _ in lora.base_parameters(lm)), held=_count(lm.parameters()),
        trained=_count(parameter for parameter in lm.parameters() if parameter.requires_grad),
        layer=max((_count(layer.parameters()) for layer in layers_of(lm)), default=0), root=_count(root),
        root_trained=_count(parameter for parameter in root if parameter.requires_grad), layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads, hidden=text.hidden_size, vocabulary=text.vocab_size,
        longest=getattr(text, "max_position_embeddings", None) or 0)


def activations_of(lm: Any, tokens: int) -> Activations:
    """Of a forward pass of a blueprint over `tokens` in one sequence."""
    layers = {id(layer): 0 for layer in layers_of(lm)}  # bytes that it keeps
    kept: dict[int, Any] = {}  # storages by their address, which is theirs only while they live
    at, rest, inputs, widest = 0, 0, 0, 0

    def enter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal at, inputs
        at = id(layer)
        inputs += next(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    def leave(*_: Any) -> None:
        nonlocal at
        at = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal rest, widest
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = storage
            if at:
                layers[at] += storage.nbytes()
                widest = max(widest, storage.nbytes())
            else:
                rest += storage.nbytes()
        return tensor

    hooks = [hook for layer in layers_of(lm)
             for hook in (layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave))]
    for value in (*lm.parameters(), *lm.buffers()):
        kept[value.untyped_storage()._cdata] = value
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        lm.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64, device="meta"), use_cache=False)
    for hook in hooks:
        hook.remove()
    return Activations(layers=sum(layers.values()), layer=max(layers.values(), default=0), inputs=inputs, widest=widest, rest=rest)


def rank_memory(
    size: ModelSize, activations: Activations, *, ranks: int, dtype: str, scored: int, recompute: bool, reference: bool
) -> dict[str, int]:
    """Bytes that a learner rank holds at the most, by what they are for; their sum is the peak.

    With N parameters, adapters included, of which P are trained, R ranks, c bytes a number in the computation, V words, M `scored` positions
    of a micro-batch:

    weights        4 N / R: the float32 shard. FSDP2 shards evenly (arXiv 2304.11277).
    gradients      4 P / R: float32, kept from the first micro-batch to the step.
    moments        8 P / R: two of AdamW, float32 (with weights and gradients the 16 bytes a parameter of ZeRO, arXiv 1910.02054).
    reference      4 N / R, when the objective has a KL term and there are no adapters (which are switched off instead).
    gathered       c (root + 2 layer): the root unit is whole from the first embedding to the last gradient, one layer computes and the next
                   is fetched or copied out of the gathering's buffer.
    working        the largest of what does not come at the same time:
        the loss        12 M V: log-probabilities, their gradient and that of the logits, in float32. M ends where the logits take
                        modeling.LOGITS_BYTES; of a trained head there is then c hidden V twice, the gradient so far and what is added;
        a layer         2 of the widest tensors for gradients that meet in its gated product, c P / N layer for its first weight gradients,
                        and with `recompute` all that it keeps;
        a reduction     2 (c + 4) P / N layer: the gradients of a layer and of the one before, in c bytes and as the float32 input;
        the root        (2 c + 4) of its trained parameters: gradients of head and embedding, and the reduction's input.
    activations    what autograd keeps of all layers, or with `recompute` their inputs, and of what follows them.

    Not in it: the masks of siblings with long common contexts (C shared tokens and T new ones below them: c T (C + T) for each of the heads
    that share keys, once for all layers) and the keys that are there again for them, the CUDA context and NCCL's buffers (about 1 GB a GPU),
    and what the allocator loses to fragments.
    """
    c = BYTES[dtype]
    share = size.trained / size.held
    kept = (activations.inputs if recompute else activations.layers) + activations.rest
    logits = 12 * min(scored, LOGITS_BYTES // (4 * size.vocabulary)) * size.vocabulary
    if 4 * scored * size.vocabulary > LOGITS_BYTES and size.root_trained:
        logits += 2 * c * size.hidden * size.vocabulary
    layer = 2 * activations.widest + int(share * c * size.layer) + recompute * activations.layer
    reduction = int(share * 2 * (c + 4) * size.layer)
    root = (2 * c + 4) * size.root_trained
    return {
        "weights": 4 * size.held // ranks, "gradients": 4 * size.trained // ranks, "moments": 8 * size.trained // ranks,
        "reference": 4 * size.parameters // ranks if reference else 0, "gathered": c * (size.root + 2 * size.layer),
        "activations": kept, "working": max(logits, layer, reduction, root),
    }


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


class _Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: its inputs, its output and a log-sum-exp a position; what the layer gets is put back in the order of
    the packed tokens, which is a copy. On tensors without numbers PyTorch would choose the kernel that keeps T x T scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, heads, T, width of a head] -> [B, T, heads, width of a value]."""
        result = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:3], dtype=torch.float32))
        return torch.empty_like(result)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None


AttentionInterface.register("counted", _attention)
