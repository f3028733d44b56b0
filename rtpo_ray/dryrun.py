"""`rtpo train --dry-run`: where a run would put what, what memory that takes, and what a sweep samples; starts nothing.

It reads config.json of the model and nothing else of it. What cannot fit is refused with the field to change. Memory of a learner rank is
`policy.memory.rank_memory`; of a generator:

    weights        c N: all of the model in model.dtype, c bytes a number.
    KV cache       2 x layers x key-value heads x width of a head x c bytes a token (arXiv 2309.06180), in what generators.gpu_memory_utilization
                   leaves of a GPU beside the weights, or in generators.kv_cache_mb.

vLLM's own activations and CUDA graphs come out of the same share, a few GB that are not in here. GB are 10^9 bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Algorithm, Stage
from rtpo_ray.checks import DATA_CPUS
from rtpo_ray.config import Config, GeneratorConfig, LearnerConfig
from rtpo_ray.errors import ConfigError
from rtpo_ray.types import Boundary, Rollout, TurnRecord, context_hash

if TYPE_CHECKING:
    from rtpo_ray.policy.memory import Activations, ModelSize

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What a run may use."""

    count: int
    cpus: float  # of one; 0: unknown, not compared
    gpus: int  # of one
    gpu_memory: float  # bytes of one GPU
    memory: float = 0.0  # bytes of one node; 0: unknown, not compared

    def __str__(self) -> str:
        return (f"{self.count} node{'s' * (self.count > 1)} of {f'{self.cpus:g}' if self.cpus else 'unknown'} CPUs and {self.gpus} GPUs"
                + (f" of {_size(self.gpu_memory)}" if self.gpus else "") + (f", {_size(self.memory)} of memory" if self.memory else ""))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Lines of the report, and why the run cannot be as it is configured."""

    lines: list[str]
    problems: list[str]


def nodes_of(config: Config, *, nodes: int | None, gpus_per_node: int | None, gpu_memory: float | None, cpus_per_node: int | None) -> Nodes:
    """The nodes that are described (gpu_memory in GB), or this machine when none are. Raises ConfigError."""
    for name, value in (("nodes", nodes), ("gpu-memory", gpu_memory), ("cpus-per-node", cpus_per_node)):
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} is {value}; expected more than 0")
    if gpus_per_node is not None and gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node is {gpus_per_node}; expected 0 or more")
    if nodes is gpus_per_node is gpu_memory is cpus_per_node is None:
        return _this_machine(config)
    return Nodes(count=nodes or 1, cpus=cpus_per_node or 0, gpus=8 if gpus_per_node is None else gpus_per_node, gpu_memory=(gpu_memory or 80.0) * GB)


def _this_machine(config: Config) -> Nodes:
    import psutil
    import torch

    gpus = torch.cuda.device_count()
    return Nodes(count=1, cpus=config.cluster.local_cpus or os.cpu_count() or 1, gpus=gpus, memory=float(psutil.virtual_memory().total),
                 gpu_memory=float(torch.cuda.get_device_properties(0).total_memory) if gpus else 0.0)


def dry_run(config: Config, model_path: str, nodes: Nodes, say: Callable[[str], None]) -> None:
    """Say all of it. `model_path`: a folder or a Hugging Face name; empty: the tiny model of warm_start, which is not built.

    Raises ConfigError, after everything was said, when the run cannot fit.
    """
    from rtpo_ray.policy.memory import activations_of, blueprint, size_of

    lm = blueprint(_model_config(config, model_path), config.learner, config.model.dtype)
    size, kept = size_of(lm), activations_of(lm, config.learner.micro_batch_tokens)
    method = algorithms.build(config.algorithm)
    say(f"model {model_path or 'tiny, from warm_start (at most)'}: {_count(size.parameters)} parameters, "
        + (f"{_count(size.trained)} of adapters are trained" if config.learner.lora_rank else "all trained"))
    learner, rank_bytes = _learner(config, method, size, kept, nodes)
    generator, engine_bytes = _generator(config, size, nodes)
    parts = [_placement(config, nodes, rank_bytes, engine_bytes), learner, generator, _sweep(config, method, size)]
    for line in [line for part in parts for line in part.lines]:
        say(line)
    problems = [problem for part in parts for problem in part.problems]
    if problems:
        raise ConfigError("; and ".join(problems))
    say("it fits")


def _model_config(config: Config, model_path: str) -> Any:
    if model_path:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(model_path)
    from rtpo_ray.policy.tiny import shape

    return shape(config, config.warm_start.vocab)


# --- where


def _placement(config: Config, nodes: Nodes, rank_bytes: float, engine_bytes: float) -> Part:
    learner, generators = config.learner, config.generators
    asked = [("rank", learner.cpus, learner.gpus)] * learner.ranks + [("generator", generators.cpus, generators.gpus)] * generators.min
    free = [[(nodes.cpus or float("inf")) - DATA_CPUS * (number == 0), float(nodes.gpus)] for number in range(nodes.count)]
    placed: list[dict[str, int]] = [{"rank": 0, "generator": 0} for _ in free]
    homeless = 0
    for kind, cpus, gpus in asked:
        at = next((number for number, (c, g) in enumerate(free) if c >= cpus - 1e-9 and g >= gpus - 1e-9), None)
        if at is None:
            homeless += 1
        else:
            free[at] = [free[at][0] - cpus, free[at][1] - gpus]
            placed[at][kind] += 1
    lines = [f"placement on {nodes}:"]
    described: tuple[tuple[str, LearnerConfig | GeneratorConfig], ...] = (
        (f"learner ranks {learner.ranks}", learner), (f"generators {_range(generators.min, generators.max)}", generators))
    for what, part in described:
        resource = f" and 1 of the resource {part.resource}" if part.resource else ""
        lines.append(f"  {what}: each {part.cpus:g} CPUs, {part.gpus:g} GPUs{resource}")
    lines += [f"  node {number}: ranks {at['rank']}, generators {at['generator']}, {nodes.gpus - left[1]:g} of {nodes.gpus} GPUs"
              + (f", {nodes.cpus - left[0]:g} of {nodes.cpus:g} CPUs" if nodes.cpus else "")
              for number, (at, left) in enumerate(zip(placed, free, strict=True)) if at["rank"] or at["generator"]]
    problems = []
    if homeless and config.cluster.autoscaling:
        lines.append(f"  {homeless} of them have to wait for nodes that the cluster adds (cluster.autoscaling)")
    elif homeless:
        problems.append(f"field learner.ranks is {learner.ranks} (x {learner.cpus:g} CPUs, {learner.gpus:g} GPUs) and generators.min is "
                        f"{generators.min} (x {generators.cpus:g} CPUs, {generators.gpus:g} GPUs): with {DATA_CPUS} CPU for Ray Data, "
                        f"{homeless} of them find no place on {nodes}; lower one of them")
    if nodes.memory and not learner.gpus:
        worst = max(at["rank"] * rank_bytes + at["generator"] * engine_bytes for at in placed)
        if worst > nodes.memory:
            problems.append(f"field learner.micro_batch_tokens is {learner.micro_batch_tokens}: learner ranks and generators need {_size(worst)} "
                            f"of the node's {_size(nodes.memory)}; lower it or generators.kv_cache_mb")
    return Part(lines=lines, problems=problems)


# --- memory


def _learner(config: Config, method: Algorithm, size: ModelSize, kept: Activations, nodes: Nodes) -> tuple[Part, float]:
    """The part, and the bytes of one rank."""
    from rtpo_ray.policy.memory import rank_memory

    learner, tokens = config.learner, config.learner.micro_batch_tokens
    reference = method.objective.kl_coef > 0 and not learner.lora_rank
    found = rank_memory(size, kept, ranks=learner.ranks, dtype=config.model.dtype,
                        scored=tokens, recompute=learner.recompute, reference=reference)
    total, state = sum(found.values()), sum(found[name] for name in ("weights", "gradients", "moments", "reference"))
    have = nodes.gpu_memory * min(learner.gpus, 1.0)
    lines = [f"memory of a learner rank: {_size(total)}" + (f" of {_size(have)}" if have else "") + f" at the most, in micro-batches of "
             f"{tokens:,} tokens, all scored" + (", layers computed again" if learner.recompute else ""),
             "  " + ", ".join(f"{name} {_size(value)}" for name, value in found.items() if value)]
    if learner.lora_rank:
        all_trained = 16 * size.parameters / learner.ranks + (4 * size.parameters / learner.ranks if method.objective.kl_coef > 0 else 0)
        lines.append(f"  LoRA of rank {learner.lora_rank}: {_size(state)} of weights, gradients and moments instead of {_size(all_trained)}")
    problems = []
    if have and state > have:
        problems.append(f"field learner.ranks is {learner.ranks}: weights, gradients and moments of a rank are {_size(state)} and it has "
                        f"{_size(have)}; raise it, or set learner.lora_rank")
    elif have and total > have:
        ways = ["lower it", "raise learner.ranks", *([] if learner.recompute else ["set learner.recompute"]),
                *([] if learner.lora_rank else ["set learner.lora_rank"])]
        problems.append(f"field learner.micro_batch_tokens is {tokens}: a learner rank needs {_size(total)} and has {_size(have)}; "
                        + ", ".join(ways[:-1]) + f" or {ways[-1]}")
    return Part(lines=lines, problems=problems), total


def _generator(config: Config, size: ModelSize, nodes: Nodes) -> tuple[Part, float]:
    """The part, and the bytes of one generator."""
    from rtpo_ray.policy.memory import BYTES

    generators, dtype = config.generators, config.model.dtype
    weights, token = BYTES[dtype] * size.parameters, size.kv_bytes(dtype)
    share = nodes.gpu_memory * generators.gpu_memory_utilization if generators.gpus else 0.0
    cache = generators.kv_cache_mb * 2**20 or max(share - weights, 0.0)
    lines = [f"memory of a generator: {_size(weights)} of {dtype} weights" + (f" in {_size(share)}, its share of a GPU" if share else "")]
    problems = []
    if 0 < generators.gpus < generators.gpu_memory_utilization:
        problems.append(f"field generators.gpu_memory_utilization is {generators.gpu_memory_utilization:g}; expected at most generators.gpus "
                        f"({generators.gpus:g}), since others may share the GPU")
    if size.longest and generators.max_model_len > size.longest:
        problems.append(f"field generators.max_model_len is {generators.max_model_len}; expected at most the model's {size.longest} positions")
    if share and weights > share:
        problems.append(f"field generators.gpu_memory_utilization is {generators.gpu_memory_utilization:g}: the weights are {_size(weights)} and "
                        f"its share of a GPU is {_size(share)}; raise it or take a smaller model")
    elif share and weights + cache > share:
        problems.append(f"field generators.kv_cache_mb is {generators.kv_cache_mb}: with {_size(weights)} of weights it exceeds its share of a "
                        f"GPU, {_size(share)}; lower it, or set it to 0 for what is left")
    elif cache:
        tokens = int(cache // token)
        fit = tokens // generators.max_model_len
        lines.append(f"  key-value cache: {_size(cache)}, {token:,} bytes a token, {tokens:,} tokens: {fit} sequences of "
                     f"generators.max_model_len ({generators.max_model_len:,})")
        if not fit:
            field = "generators.kv_cache_mb" if generators.kv_cache_mb else "generators.gpu_memory_utilization"
            value = generators.kv_cache_mb or generators.gpu_memory_utilization
            problems.append(f"field {field} is {value:g}: the key-value cache holds {tokens:,} tokens; expected at least one sequence of "
                            f"generators.max_model_len ({generators.max_model_len}), {generators.max_model_len * token / 2**20:,.0f} MiB")
        elif fit < generators.max_num_seqs:
            lines.append(f"  warning: generators.max_num_seqs is {generators.max_num_seqs}; when more than {fit} sequences grow to full length, vLLM "
                         "puts some back and computes them again")
    else:
        lines.append("  key-value cache: whatever vLLM finds free (generators.kv_cache_mb is 0)")
    return Part(lines=lines, problems=problems), weights + cache


# --- work


def _sweep(config: Config, method: Algorithm, size: ModelSize) -> Part:
    """Upper bounds: every episode takes all of its turns and every response all of its tokens."""
    from rtpo_ray.policy.memory import BYTES

    tasks, turns = config.sampling.tasks_per_sweep, config.environment.max_turns
    trunks = tasks * method.n_trunks
    stages = method.stages(turns)
    tokens = trunks * _longest(config, 0)
    rows = [f"  {'trunks':10} {trunks:8,} rollouts {tokens:14,} tokens"]
    objective = method.objective
    steps = objective.epochs * objective.minibatches * (turns if objective.turns else 1)
    for stage in stages:
        starts = _starts(method, stage, turns)
        sampled, generated = tasks * sum(starts.values()), tasks * sum(count * _longest(config, turn) for turn, count in starts.items())
        tokens += generated
        name = "all turns" if stage.turn is None else f"turn {stage.turn}"
        rows.append(f"  {name:10} {sampled:8,} siblings {generated:14,} tokens, {steps} optimizer step{'s' * (steps > 1)}"
                    + (", weights pushed" if stage.publish else ""))
    pushes = max(sum(stage.publish for stage in stages), 1)
    lines = [f"a sweep of {config.algorithm.name}, at the most: {tasks:,} tasks of {turns} turns, {tokens:,} tokens, {steps * len(stages)} optimizer "
             "steps", *rows, f"a weight push: {_size(BYTES[config.model.dtype] * size.parameters)} to each generator, {pushes} a sweep"]
    return Part(lines=lines, problems=[])


def _longest(config: Config, turn: int) -> int:
    """Tokens that a rollout from `turn` on may sample."""
    left = config.environment.max_turns - turn
    responses = left * (2 if config.environment.context == "summary" else 1)
    most = responses * config.sampling.max_response_tokens
    return min(most, config.generators.max_model_len) if config.environment.context == "append" else most  # there they share one sequence


def _starts(method: Algorithm, stage: Stage, turns: int) -> dict[int, int]:
    """Siblings of one task that the stage samples, by the turn from which they start, as the method says of trunks that took all turns."""
    if stage.turn is None and not method.branching:
        return {}
    found: dict[int, int] = {}
    for branch in method.branches(stage, _full_trunks(method.n_trunks, turns), random.Random(0)):
        found[branch.turn] = found.get(branch.turn, 0) + branch.count
    return found


def _full_trunks(count: int, turns: int) -> Sequence[Rollout]:
    record: dict[str, Any] = dict(context_ids=(0,), context_hash=context_hash([0]), response_ids=(0,), engine_logprobs=(-1.0,), weight_version=0,
                                  seed=0, temperature=1.0, finish_reason="stop", observation="", reward=0.0, state_hash="")
    return [Rollout(rollout_id=f"t/{number}", task_id="t", turns=tuple(TurnRecord(turn=turn, **record) for turn in range(turns)),
                    boundaries=tuple(Boundary(turn=turn, context_hash="", state_hash="", snapshot=b"") for turn in range(turns)))
            for number in range(count)]


def _range(least: int, most: int) -> str:
    return f"{least} to {most}" if most > least else str(least)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _size(number: float) -> str:
    return f"{number / GB:.2f} GB" if number >= GB else f"{number / 1e6:.1f} MB"
