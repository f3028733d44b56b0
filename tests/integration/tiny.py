"""A random tiny Qwen3 with tied embeddings, small enough to start and score in seconds on one core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 1024


def save_tiny_qwen3(folder: Path, *, seed: int = 0) -> Path:
    """Write a Hugging Face folder (config and weights, no tokenizer): 2 layers, 128 wide, 0.5 M parameters, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def load_tiny_qwen3(folder: Path) -> Any:
    """The transformers model of that folder, float32, in evaluation mode."""
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def perturb(model: Any, *, seed: int, scale: float = 0.02) -> None:
    """Add noise to every parameter in place, so that a push which leaves any of them out shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def score(model: Any, context_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """[T]: log_softmax(logits / temperature) of each response token, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context_ids, *response_ids]])).logits[0, len(context_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response_ids)[:, None])[:, 0].tolist()
