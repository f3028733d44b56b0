"""Gloo ranks for tests: three processes, started once a test session, each call with a deadline. Also the model they load.

    results = run_ranks(2, my_function, argument)   # my_function(rank, world, argument) on 2 ranks; results in rank order
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.utils.logging import disable_progress_bar

from rtpo_ray.policy.learner import init_distributed

MAX_RANKS = 3
_WORKERS: list[tuple[Any, Any]] = []  # (process, our end of its pipe)


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, deadline: float = 40.0) -> list[Any]:
    """`function(rank, world, *arguments)` on gloo ranks 0 .. world - 1 of one default group.

    AssertionError with the first failing rank's traceback, or naming the ranks that were not done after `deadline` seconds.
    """
    if not _WORKERS:
        _start()
    init_method = f"file://{folder()}/group-{time.monotonic_ns()}"
    for rank in range(world):
        _WORKERS[rank][1].send((function, rank, world, init_method, arguments))
    end = time.monotonic() + deadline
    replies = [_WORKERS[rank][1].recv() if _WORKERS[rank][1].poll(max(0.0, end - time.monotonic())) else None for rank in range(world)]
    late = [rank for rank, reply in enumerate(replies) if reply is None]
    if late:
        _stop()
    failures = [f"rank {rank}:\n{reply[1]}" for rank, reply in enumerate(replies) if reply is not None and not reply[0]]
    assert not failures, "\n".join(failures)
    assert not late, f"ranks {late} of {world} not done with {function.__name__} after {deadline} s"
    return [reply[1] for reply in replies if reply is not None]


def _start() -> None:
    # A fork server imports torch once instead of three times. It runs nothing, so there are no threads to lose in a fork.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rtpo_ray.policy.learner", "transformers.models.qwen3.modeling_qwen3"])
    for _ in range(MAX_RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        _WORKERS.append((process, ours))


@atexit.register
def _stop() -> None:
    for process, _ in _WORKERS:
        process.kill()
        process.join(5)
    _WORKERS.clear()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    while True:
        function, rank, world, init_method, arguments = pipe.recv()
        try:
            init_distributed(rank, world, init_method, "cpu", timeout_seconds=20.0)
            reply = (True, function(rank, world, *arguments))
        except Exception:  # noqa: BLE001 - shown by the test that asked
            reply = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(reply)


@functools.cache
def folder() -> Path:
    """A temporary folder of this test session."""
    path = Path(tempfile.mkdtemp(prefix="rtpo-unit-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def tiny_model(tied: bool = True, layers: int = 2) -> str:
    """Folder of a small Qwen3, 32 wide, 64 tokens, with fixed random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.2)
    path = str(folder() / f"tiny-{tied}-{layers}")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def learner_config(**changes: Any) -> Any:
    """A learner section. eps and lr are so large that AdamW's first step subtracts the gradient itself (and no weight decay)."""
    defaults: dict[str, Any] = dict(
        micro_batch_tokens=64, lr=1e6, warmup_steps=0, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e6, max_grad_norm=1e9, max_refused=3,
        share_prefixes=True, recompute=False, compile=False, lora_rank=0, lora_alpha=32.0, lora_targets="all-linear")
    return SimpleNamespace(**{**defaults, **changes})


@functools.cache
def tiny_tokenizer() -> str:
    """Folder of a tokenizer of two words, for exports."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = str(folder() / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))).save_pretrained(path)
    return path
