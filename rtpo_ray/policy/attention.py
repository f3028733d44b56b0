"""Attention over a packed forest, as a function that Hugging Face models can be told to use, and whether a given model can.

A model calls it in every layer with the micro-batch's `Layout`, or without one, as any other implementation.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rtpo_ray.policy.forest import Layout, in_prefix_order, pack
from rtpo_ray.types import Sample

FOREST = "forest"
log = logging.getLogger(__name__)


@torch.compiler.disable
def forest_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float | None = None,
    layout: Layout | None = None, **options: Any
) -> tuple[Tensor, None]:
    """query [1, heads, N, width], key and value [1, key-value heads, N, width] -> [1, N, heads, width of a value].

    Without a layout: PyTorch's attention, causal.
    """
    if layout is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return found
    # One gather of each for all calls: its backward pass is one scatter, not one a call.
    queries = query[0].transpose(0, 1).index_select(0, layout.queries)
    keys, values = (tensor[0].transpose(0, 1).index_select(0, layout.keys) for tensor in (key, value))
    heads, shared = queries.shape[1], keys.shape[1]
    sizes = [(call.blocks * call.queries, call.blocks * call.keys) for call in layout.calls]
    pieces = zip(layout.calls, queries.split([q for q, _ in sizes]), keys.split([k for _, k in sizes]), values.split([k for _, k in sizes]),
                 strict=True)
    outputs = []
    for call, q, k, v in pieces:
        k, v = (part.unflatten(0, (call.blocks, call.keys)).transpose(1, 2) for part in (k, v))
        if call.mask is None:
            q = q.unflatten(0, (call.blocks, call.queries)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=heads != shared).transpose(1, 2)
        else:
            # Heads that share keys as further queries: under a mask no kernel knows of sharing, and repeated keys would be kept for the
            # backward pass.
            q = q.view(call.blocks, call.queries, shared, heads // shared, -1).transpose(1, 2).flatten(2, 3)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask, scale=scaling)
            out = out.unflatten(2, (call.queries, heads // shared)).transpose(1, 2)
        outputs.append(out.reshape(call.blocks * call.queries, heads, -1))
    return torch.cat(outputs).index_select(0, layout.back)[None], None


AttentionInterface.register(FOREST, forest_attention)


def biased(layout: Layout, lm: Any) -> Layout:
    """The layout as the layers of `lm` need it in a forward pass."""
    config = lm.config.get_text_config()
    sharing = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return layout.with_bias(lm.get_input_embeddings().weight.dtype, sharing)


def use_forest(lm: Any) -> bool:
    """Make `lm` compute packed forests, if it can: else leave it as it is and log the reason."""
    before = lm.config._attn_implementation
    reason = _seen_in_configuration(lm) or _seen_in_a_probe(lm)
    if reason:
        lm.set_attn_implementation(before)
        log.warning("%s: %s, so micro-batches are padded and share no prefixes", type(lm).__name__, reason)
    return not reason


def _seen_in_configuration(lm: Any) -> str:
    config = lm.config.get_text_config()
    if not getattr(lm, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"its attention slides over {config.sliding_window} tokens"
    return ""


@torch.no_grad()
def _seen_in_a_probe(lm: Any) -> str:
    """Scores small samples one by one, then packed, with the attention that it then keeps."""
    most, device = lm.config.get_text_config().vocab_size, lm.device
    trees = [([1, 2, 3, 4, 5], [6, 7, 8]), ([1, 2, 3, 4, 5], [9, 10]), ([4, 3], [2, 1, 5, 6])]
    samples = [Sample(sample_id=str(number), context_ids=[token % most for token in context], context_hash="",
                      response_ids=[token % most for token in response], engine_logprobs=[0.0] * len(response), advantage=0.0, weight=0.0)
               for number, (context, response) in enumerate(trees)]
    placed = in_prefix_order(samples)
    alone = [lm(input_ids=torch.from_numpy(item.ids)[None].to(device), use_cache=False).logits[0] for item in placed]
    expected = torch.cat([logits[len(item.sample.context_ids) - 1 :] for logits, item in zip(alone, placed, strict=True)])
    packed = pack(placed)
    lm.set_attn_implementation(FOREST)
    try:
        layout = biased(packed.layout.to(device), lm)
        logits = lm(input_ids=torch.from_numpy(packed.input_ids)[None].to(device), position_ids=layout.positions, use_cache=False,
                    layout=layout).logits[0]
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it does not compute a packed micro-batch ({type(error).__name__}: {error})"
    found = logits[torch.from_numpy(packed.columns[packed.scored]).to(device)]
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    return "" if gap < 1e-3 else f"packed, its logits differ by {gap:.1e} of the largest"
