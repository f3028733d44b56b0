"""The policy for training: a causal LM from a Hugging Face folder, log-probabilities at chosen positions, FSDP2.

Master weights are float32; `compute_dtype` is what the forward and backward passes use. One code path for CPUs (gloo) and
GPUs (nccl), and for any number of ranks including one.

Axes: B sequences, L padded length, M scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


class Policy(nn.Module):
    """Log-probabilities of given tokens under a causal LM, and values when it has a head for them.

    Sequences are padded on the right and attention is causal, so no scored position can see padding and no mask is needed.
    """

    def __init__(self, lm: Any, compute_dtype: torch.dtype, value_head: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.plain_head = _head_is_plain(lm)
        self.value_head = _new_value_head(lm) if value_head else None

    def forward(self, input_ids: Tensor, rows: Tensor, columns: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        """float32 [M] each: log pi(targets[m] | input_ids[rows[m], :columns[m] + 1]) at `temperature`, and the value of that prefix.

        input_ids [B, L]; rows, columns, targets [M], where columns is the position whose logits predict the target.
        """
        if self.plain_head:
            hidden = self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[rows, columns]
            logits = self.lm.get_output_embeddings()(hidden)
        else:
            output = self.lm(input_ids=input_ids, use_cache=False, output_hidden_states=self.value_head is not None)
            logits = output.logits[rows, columns]
            hidden = output.hidden_states[-1][rows, columns] if self.value_head is not None else None
        values = self.value_head(hidden).float().sum(-1) if self.value_head is not None else None
        return -F.cross_entropy(logits.float() / temperature, targets, reduction="none"), values


def load_policy(path: str, device: torch.device, compute_dtype: torch.dtype, value_head: bool = False) -> Policy:
    """The causal LM in the folder `path`, float32 on `device`, in evaluation mode; `value_head` adds one that begins at 0.

    Evaluation mode because dropout would make the learner score another distribution than the engine sampled from.
    """
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return Policy(lm.to(device).eval(), compute_dtype, value_head)


def shard(policy: Policy, device: torch.device) -> Policy:
    """Apply FSDP2 over the default process group, in place: one unit a transformer layer, one for the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if policy.compute_dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
    layers = set(policy.lm._no_split_modules or ())
    for module in list(policy.lm.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # FSDP2 would keep the root's full weights after a pass without gradients; freed, they cannot be stale in the next pass.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return policy


@torch.no_grad()
def full_parameters(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as (Hugging Face name, full tensor on the policy's device), one at a time, tied weights once.

    Collective: every rank iterates to the end, in the same order. A tensor may share memory with the policy: read it only.
    """
    for name, parameter in policy.lm.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


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
