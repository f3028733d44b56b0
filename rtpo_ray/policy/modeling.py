"""The policy for training: a causal LM from a Hugging Face folder, log-probabilities at chosen positions, FSDP2.

Master weights are float32; `compute_dtype` is what the forward and backward passes use. One code path for CPUs (gloo) and
GPUs (nccl), and for any number of ranks including one.

Axes: B sequences, L padded length, S scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from rtpo_ray.policy import lora
from rtpo_ray.policy.attention import biased, use_forest
from rtpo_ray.policy.forest import Layout

if TYPE_CHECKING:
    from rtpo_ray.config import LearnerConfig


LOGITS_BYTES = 256 * 2**20  # float32 logits that exist at once


class Policy(nn.Module):
    """Log-probabilities of given tokens under a causal LM, and values when it has a head for them.

    It takes sequences packed, when `packs`, or padded on the right: attention is causal, so no scored position can see padding and no mask
    is needed.
    """

    packs = False  # whether forward takes a layout

    def __init__(self, lm: Any, compute_dtype: torch.dtype, value_head: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.plain_head = _head_is_plain(lm)
        self.packs = use_forest(lm)
        self.value_head = _new_value_head(lm) if value_head else None

    def forward(
        self, input_ids: Tensor, rows: Tensor, columns: Tensor, labels: Tensor, temperature: float, layout: Layout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """float32 [S] each: log pi(labels[s] | what input_ids[rows[s], columns[s]] ends) at `temperature`, and the value of that prefix.

        input_ids [B, L]; rows, columns, labels [S], where columns is the position whose logits predict the label. `layout`: of a packed
        micro-batch [1, N].
        """
        options: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if layout is not None:
            options |= {"position_ids": layout.positions, "layout": biased(layout, self.lm)}
        if self.plain_head:
            hidden = self.lm.base_model(**options).last_hidden_state[rows, columns]
            logprobs = token_logprobs(self.lm.get_output_embeddings(), hidden, labels, temperature)
        else:
            output = self.lm(**options, output_hidden_states=self.value_head is not None)
            logprobs = _logprobs(output.logits[rows, columns], labels, temperature)
            hidden = output.hidden_states[-1][rows, columns] if self.value_head is not None else None
        values = self.value_head(hidden).float().sum(-1) if self.value_head is not None else None
        return logprobs, values


def token_logprobs(head: Any, hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """float32 [S]: log softmax(head(hidden) / temperature) of the labels; hidden [S, width].

    Logits are made for LOGITS_BYTES at a time and once more in the backward pass, so that they never take more.
    """
    rows = max(LOGITS_BYTES // (4 * head.weight.shape[0]), 1)
    if len(hidden) <= rows:
        return _logprobs(head(hidden), labels, temperature)

    def part(hidden: Tensor, labels: Tensor) -> Tensor:
        return _logprobs(head(hidden), labels, temperature)

    chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.cat([checkpoint(part, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])


def _logprobs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return -F.cross_entropy(logits.float() / temperature, labels, reduction="none")


def load_policy(
    path: str, device: torch.device, compute_dtype: torch.dtype, value_head: bool = False, adapters: LearnerConfig | None = None, seed: int = 0
) -> Policy:
    """The causal LM in the folder `path`, float32 on `device`, in evaluation mode; `value_head` adds one that begins at 0.

    `adapters`: freeze it and train LoRA adapters, drawn by `seed`, instead. Raises ConfigError when lora_targets names no linear layer.
    Evaluation mode because dropout would make the learner score another distribution than the engine sampled from.
    """
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    if adapters is not None:
        lora.add_adapters(lm, rank=adapters.lora_rank, alpha=adapters.lora_alpha, targets=adapters.lora_targets, seed=seed)
    return Policy(lm.to(device).eval(), compute_dtype, value_head)


def layers_of(lm: Any) -> list[Any]:
    """The transformer layers, as the model names them."""
    names = set(lm._no_split_modules or ())
    return [module for module in lm.modules() if type(module).__name__ in names]


def shard(policy: Policy, device: torch.device, recompute: bool = False, compiled: bool = False) -> Policy:
    """Apply FSDP2 over the default process group, in place: one unit a transformer layer, one for the rest.

    `recompute`: keep only the input of every layer for the backward pass, and compute the rest again there. `compiled`: let torch.compile
    fuse what a layer does token by token, once for any number of tokens; the attention over a forest stays as it is.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if policy.compute_dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
    for layer in layers_of(policy.lm):
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # FSDP2 would keep the root's full weights after a pass without gradients; freed, they cannot be stale in the next pass.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return policy


@torch.no_grad()
def full_parameters(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as (Hugging Face name, full tensor on the policy's device), one at a time, tied weights once, adapters merged.

    Collective: every rank iterates to the end, in the same order. A tensor may share memory with the policy: read it only.
    """
    for name, parameter, layer in lora.base_parameters(policy.lm):
        value = _full(parameter)
        if layer is not None:
            a, b, scale = lora.adapter(layer)
            value = lora.merge(value, _full(a), _full(b), scale)
        yield name, value


def _full(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _new_value_head(lm: Any) -> nn.Linear:
    head = nn.Linear(lm.config.get_text_config().hidden_size, 1, device=lm.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def _head_is_plain(lm: Any) -> bool:
    """Whether output_embeddings(last hidden state) are the logits. Some models scale or cap them (Gemma, Cohere, Granite).

    Measured on a few tokens instead of read from the configuration: every family names its scale differently.
    """
    head = lm.get_output_embeddings()
    if head is None:
        return False
    probe = torch.arange(4, device=lm.device).remainder(lm.config.get_text_config().vocab_size)[None]
    was_training = lm.training
    lm.eval()
    expected = lm(input_ids=probe, use_cache=False).logits
    found = head(lm.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    lm.train(was_training)
    # Equal to the bit when it is the same computation; a false alarm costs speed only, since the full path is always right.
    return torch.equal(found, expected)
