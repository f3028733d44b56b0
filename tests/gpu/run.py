"""Checks that need a GPU, as one script of under 3 minutes on an H200: python tests/gpu/run.py. Needs torch,
transformers and peft only.

1. A bf16 update on the GPU has the loss and gradient of the fp32 one on the CPU, and the fp32 one on the GPU as well.
2. The weight channel sends a model over NCCL, and its hash is that of the same bytes on the CPU.
3. LoRA's merged weights have the log-probabilities of the adapters after a step, and the base weights have not moved.
4. Packed micro-batches have the gradient of padded ones, in fp32 and bf16, and how much faster they are.
5. Tokens per second and MFU of an update at the shape of Qwen3-0.6B, and its peak memory against what a dry run says.

Every function takes the device, so that `--device cpu --tiny` runs the same code where there is no GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from rtpo_ray.algorithms.base import Objective
from rtpo_ray.network import open_store  # noqa: E402
from rtpo_ray.policy import lora, memory, modeling  # noqa: E402
from rtpo_ray.policy.batching import plan  # noqa: E402
from rtpo_ray.policy.learner import Learner, init_distributed  # noqa: E402
from rtpo_ray.types import Sample, UpdateResult, context_hash  # noqa: E402
from rtpo_ray.weights.channel import WeightChannel  # noqa: E402
from rtpo_ray.weights.hashing import WeightsHash  # noqa: E402

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, by a part of the device's name
SMALL: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    initializer_range=0.05)
QWEN3_06B: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128)
# AdamW's first step with these is minus the gradient, so that a gradient is the difference of parameters.
GRADIENT_IS_THE_STEP = dict(lr=1e6, eps=1e6, weight_decay=0.0, max_grad_norm=1e9)


def learner_config(**changes: Any) -> Any:
    """The fields of rtpo_ray.config.LearnerConfig that the learner reads, without the library that reads YAML."""
    defaults: dict[str, Any] = dict(
        micro_batch_tokens=8192, lr=1e-6, warmup_steps=0, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0,
        max_refused=3, share_prefixes=True, recompute=False, compile=False, lora_rank=0, lora_alpha=32.0, lora_targets="all-linear")
    return SimpleNamespace(**{**defaults, **changes})


def make_model(folder: Path, shape: dict[str, Any], device: str) -> str:
    """A tied Qwen3 of this shape with fixed random weights; its folder. Made on `device`, which is faster on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        lm = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True))
    path = str(folder / f"qwen3-{shape['hidden_size']}x{shape['num_hidden_layers']}")
    lm.save_pretrained(path)
    return path


def make_samples(count: int, context: int, response: int, vocabulary: int, ragged: bool) -> list[Sample]:
    """Random samples; ragged ones have 1 to `context` and 1 to `response` tokens."""
    rng, samples = random.Random(0), []
    for number in range(count):
        lengths = (rng.randint(1, context), rng.randint(1, response)) if ragged else (context, response)
        ids, answer = ([rng.randrange(vocabulary) for _ in range(length)] for length in lengths)
        samples.append(Sample(sample_id=f"s{number:04d}", context_ids=ids, context_hash=context_hash(ids), response_ids=answer,
                              engine_logprobs=[-6.0] * len(answer), advantage=rng.uniform(-1, 1), weight=0.25))
    return samples


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A default process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        init_distributed(0, 1, f"file://{folder}/group", device, timeout_seconds=120.0)
        try:
            yield
        finally:
            dist.destroy_process_group()


def make_learner(path: str, config: Any, dtype: str, device: str) -> Learner:
    return Learner(path, config, objective=Objective(), dtype=dtype, temperature=1.0, device=device)


def one_update(path: str, samples: list[Sample], dtype: str, device: str) -> tuple[UpdateResult, torch.Tensor, torch.Tensor]:
    """Result of one update, log-probabilities before it [tokens] and its gradient [parameters], float64 on the CPU."""
    with one_rank(device):
        learner = make_learner(path, learner_config(**GRADIENT_IS_THE_STEP, micro_batch_tokens=1024), dtype, device)
        logprobs = learner.score([(sample.context_ids, sample.response_ids) for sample in samples])
        before = torch.cat([value.double().cpu().flatten() for _, value in modeling.full_parameters(learner.policy)])
        result = learner.update(samples, n_groups=4, n_rollouts=16, seed=0)
        after = torch.cat([value.double().cpu().flatten() for _, value in modeling.full_parameters(learner.policy)])
    assert result.optimizer_steps == 1, f"the update was refused: {result.refused}"
    return result, torch.tensor([value for values in logprobs for value in values], dtype=torch.float64), before - after


def check_gradients(folder: Path, device: str, shape: dict[str, Any] = SMALL) -> None:
    """fp32 on the CPU against fp32 and bf16 on `device`."""
    path = make_model(folder, shape, "cpu")
    samples = make_samples(16, 48, 32, shape["vocab_size"], ragged=True)
    reference, expected_logprobs, expected = one_update(path, samples, "float32", "cpu")
    for dtype, least, largest_gap in (("float32", 0.9999, 1e-3), ("bfloat16", 0.99, 0.2)):
        result, logprobs, found = one_update(path, samples, dtype, device)
        cosine = float(found @ expected / (found.norm() * expected.norm()))
        norm = abs(result.grad_norm / reference.grad_norm - 1)
        gap = float((logprobs - expected_logprobs).abs().max())
        loss = abs(result.loss - reference.loss)
        error = float((found - expected).norm() / expected.norm())
        print(f"gradient {dtype} on {device} against float32 on cpu: cosine {cosine:.6f}, relative error {error:.1e}, norm {norm:.1e}; "
              f"loss {loss:.1e}, worst log-probability {gap:.1e} absolute")
        assert cosine > least, f"{dtype}: cosine of the gradients is {cosine}, expected more than {least}"
        assert norm < 0.05, f"{dtype}: gradient norm differs by {norm}, expected less than 0.05"
        assert loss < 1e-3, f"{dtype}: loss differs by {loss}, expected less than 0.001"
        assert gap < largest_gap, f"{dtype}: a log-probability differs by {gap}, expected less than {largest_gap}"


def check_channel(folder: Path, device: str, shape: dict[str, Any] = SMALL) -> None:
    """Send the learner's bf16 weights to nobody, beside the learner's own group, in small buckets; twice."""
    path = make_model(folder, shape, "cpu")
    with one_rank(device):
        learner = make_learner(path, learner_config(), "bfloat16", device)
        store = open_store("127.0.0.1", 30.0)
        channel = WeightChannel("gpu-test", 0, 1, "127.0.0.1", store.port, device, 60.0, 100_000)
        on_cpu = WeightsHash()
        for name, value in learner.full_parameters():
            on_cpu.add(name, value.cpu())
        manifest = learner.parameters_manifest()
        for version in (1, 2):
            start = time.perf_counter()
            found = channel.send(version, manifest, learner.full_parameters())
            megabytes = sum(spec.nbytes for spec in manifest) / 1e6
            print(f"weight channel on {device}: version {version}, {megabytes:.1f} MB, {time.perf_counter() - start:.3f} s, hash {found}")
            assert found == on_cpu.hexdigest(), f"hash on {device} is {found}, on the cpu {on_cpu.hexdigest()}"
        channel.close()


def check_lora(folder: Path, device: str, shape: dict[str, Any] = SMALL) -> None:
    """The exported, merged model against the learner with adapters on `device`, after two steps. In bfloat16 a merged weight is rounded
    once, and an adapter's output by itself, so that the two differ as bfloat16 and float32 do."""
    path = make_model(folder, shape, "cpu")
    samples = make_samples(16, 48, 32, shape["vocab_size"], ragged=True)
    sequences = [(sample.context_ids, sample.response_ids) for sample in samples]
    for dtype, largest_gap in (("float32", 1e-3), ("bfloat16", 0.2)):
        merged = str(folder / f"merged-{dtype}")
        with one_rank(device):
            learner = make_learner(path, learner_config(lora_rank=8, lr=1e-2, micro_batch_tokens=1024), dtype, device)
            base = {name: value.cpu() for name, value in learner.full_parameters()}
            before = learner.score(sequences)
            for seed in range(2):
                assert learner.update(samples, n_groups=4, n_rollouts=16, seed=seed).optimizer_steps == 1
            after = learner.score(sequences)
            with lora.without_adapters(learner.policy.lm):
                unmoved = learner.score(sequences) == before
            changed = [name for name, value in learner.full_parameters() if not torch.equal(value.cpu(), base[name])]
            learner.policy.lm.save_pretrained(merged, state_dict={name: value.cpu() for name, value in modeling.full_parameters(learner.policy)})
        with one_rank(device):
            found = make_learner(merged, learner_config(micro_batch_tokens=1024), dtype, device).score(sequences)
        gap, moved = (max(abs(x - y) for one, two in zip(found, other, strict=True) for x, y in zip(one, two, strict=True))
                      for other in (after, before))
        print(f"LoRA {dtype} on {device}: {len(changed)} merged weights of {len(base)} changed, log-probabilities by up to {moved:.2f}; merged "
              f"against adapters {gap:.1e}")
        assert unmoved, f"{dtype}: the base model's log-probabilities changed"
        assert len(changed) == 7 * shape["num_hidden_layers"], f"{dtype}: {len(changed)} weights changed, expected the linear layers'"
        assert gap < largest_gap < moved, f"{dtype}: gap {gap}, expected less than {largest_gap}, and the step to move more ({moved})"


def sibling_samples(groups: int, context: int, response: int, vocabulary: int) -> list[Sample]:
    """8 responses to every context, all random."""
    rng, samples = random.Random(0), []
    for group in range(groups):
        ids = [rng.randrange(vocabulary) for _ in range(context)]
        for j in range(8):
            answer = [rng.randrange(vocabulary) for _ in range(response)]
            samples.append(Sample(sample_id=f"{group}/{j}", context_ids=ids, context_hash=context_hash(ids), response_ids=answer, group_id=str(group),
                                  engine_logprobs=[-6.0] * response, advantage=rng.uniform(-1, 1), weight=0.125))
    return samples


def one_pass(policy: modeling.Policy, samples: list[Sample], budget: int, packed: bool, device: str) -> int:
    """Forward and backward pass of -sum A log pi; positions that were computed. Adds to the gradient."""
    positions = 0
    for make in plan(samples, budget, packed=packed):
        batch = make().to(torch.device(device))
        logprobs, _ = policy(batch.input_ids, batch.rows, batch.columns, batch.labels, 1.0, layout=batch.layout)
        (-(batch.advantages * batch.weights * logprobs[batch.scored]).sum()).backward()
        positions += batch.input_ids.numel()
    return positions


def check_packing(folder: Path, device: str, shape: dict[str, Any] = SMALL, groups: int = 4, context: int = 1024, response: int = 64) -> None:
    """Gradients of packed siblings against padded ones, and medians of alternating passes of both."""
    path = make_model(folder, shape, "cpu")
    samples = sibling_samples(groups, context, response, shape["vocab_size"]) + make_samples(8, context, response, shape["vocab_size"], ragged=True)
    for dtype, least in (("float32", 0.9999), ("bfloat16", 0.99)):
        with one_rank(device):
            policy = make_learner(path, learner_config(), dtype, device).policy
            assert policy.packs, "a Qwen3 is packed"
            gradients, seconds = {}, {True: list[float](), False: list[float]()}
            for packed in (True, False):
                policy.zero_grad()
                positions = one_pass(policy, samples, 8 * (context + response), packed, device)
                found = [value.grad for value in policy.parameters() if isinstance(value.grad, DTensor)]
                gradients[packed] = torch.cat([value.full_tensor().flatten().double() for value in found])
                print(f"{'packed' if packed else 'padded'}: {positions:,} positions")
            for _ in range(5):
                for packed in (True, False):
                    _synchronize(device)
                    start = time.perf_counter()
                    one_pass(policy, samples, 8 * (context + response), packed, device)
                    _synchronize(device)
                    seconds[packed].append(time.perf_counter() - start)
        cosine = float(torch.nn.functional.cosine_similarity(gradients[True], gradients[False], dim=0))
        error = float((gradients[True] - gradients[False]).norm() / gradients[False].norm())
        ratio = statistics.median(slow / fast for slow, fast in zip(seconds[False], seconds[True], strict=True))
        padded_ms, packed_ms = (statistics.median(seconds[packed]) * 1e3 for packed in (False, True))
        print(f"packing {dtype} on {device}: cosine {cosine:.6f}, relative error {error:.1e}; padded {padded_ms:.0f} ms, packed {packed_ms:.0f} ms, "
              f"{ratio:.2f} times faster")
        assert cosine > least, f"{dtype}: cosine of packed and padded gradients is {cosine}, expected more than {least}"


def expected_memory(path: str, dtype: str, tokens: int, scored: int) -> float:
    """Bytes, by the model that a dry run uses."""
    config = learner_config()
    lm = memory.blueprint(AutoConfig.from_pretrained(path), config, dtype)
    return sum(memory.rank_memory(memory.size_of(lm), memory.activations_of(lm, tokens), ranks=1, dtype=dtype, scored=scored, recompute=False,
                                  reference=False).values())


def measure_training(
    folder: Path, device: str, shape: dict[str, Any] = QWEN3_06B, samples: int = 32, response: int = 768, steps: int = 5
) -> float:
    """Tokens/s of whole updates (batching, forward, backward, optimizer) after one untimed; prints MFU = 6 N tokens/s / peak."""
    path = make_model(folder, shape, device)
    batch = make_samples(samples, response // 3, response, shape["vocab_size"], ragged=False)
    with one_rank(device):
        learner = make_learner(path, learner_config(), "bfloat16", device)
        parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
        tokens = learner.update(batch, n_groups=samples // 4, n_rollouts=samples, seed=0).learner_tokens
        _synchronize(device)
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for seed in range(steps):
            result = learner.update(batch, n_groups=samples // 4, n_rollouts=samples, seed=seed)
            assert result.optimizer_steps == 1, f"update {seed} was refused: {result.refused}"
        _synchronize(device)
        rate = tokens * steps / (time.perf_counter() - start)
        peak_bytes = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
    most = min(learner_config().micro_batch_tokens, tokens)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    mfu = f"{6 * parameters * rate / peak:.1%}" if peak else "unknown (no peak on record for this device)"
    print(f"training on {name}: {parameters / 1e6:.0f} M parameters, {tokens} tokens an update, {rate:,.0f} tokens/s, MFU {mfu}, "
          f"peak memory {peak_bytes / 2**30:.1f} GiB, as computed {expected_memory(path, 'bfloat16', most, most * 3 // 4) / 2**30:.1f} GiB")
    return rate


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where to run; cpu is for trying the script itself")
    parser.add_argument("--tiny", action="store_true", help="train a small shape instead of Qwen3-0.6B's")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 0
    size: dict[str, Any] = dict(shape=SMALL, samples=8, response=48) if options.tiny else {}
    with tempfile.TemporaryDirectory() as folder:
        check_gradients(Path(folder), options.device)
        check_channel(Path(folder), options.device)
        check_lora(Path(folder), options.device)
        check_packing(Path(folder), options.device, groups=1 if options.tiny else 4, context=96 if options.tiny else 1024)
        measure_training(Path(folder), options.device, **size)
    print("all GPU checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
