"""What packing and sharing prefixes save the learner: forward and backward of the same samples, packed against padded rows, alternating.

    python tests/bench/learner.py                 # about two minutes on a core; writes results/learner.json
    python tests/bench/learner.py --small         # a smaller model and fewer repetitions, to try the script

`siblings`: groups of 8 responses of 64 random tokens to contexts of 1,024. `quickstart`: groups of 8 scripted actions at the turns of the lookup
environment, in its tokens, on the quickstart's model. `chains`: the same environment, 8 whole episodes a task, as GRPO trains them. Seconds are
those of the CPU, include making the micro-batches and are medians of alternating passes. Gradients of both ways are compared too. `positions`
are what is computed; `unique` is what has to be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from rtpo_ray import environments  # noqa: E402
from rtpo_ray.config import load_config  # noqa: E402
from rtpo_ray.episodes.contexts import Append, ChatTemplate  # noqa: E402
from rtpo_ray.policy import modeling, tiny  # noqa: E402
from rtpo_ray.policy.batching import plan  # noqa: E402
from rtpo_ray.types import Sample, context_hash  # noqa: E402

SCALED: dict[str, Any] = dict(vocab_size=512, hidden_size=256, intermediate_size=1024, head_dim=32, num_hidden_layers=4, num_attention_heads=8,
                              num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True)
PADDED, PACKED, UNSHARED = ("padded", dict(packed=False)), ("packed", dict(packed=True)), ("packed, nothing shared", dict(packed=True, share=False))


def sample(name: str, group: str, context: list[int], response: list[int], rollout: str = "") -> Sample:
    return Sample(sample_id=name, context_ids=context, context_hash=context_hash(context), response_ids=response,
                  engine_logprobs=[-1.0] * len(response), advantage=random.Random(name).uniform(-1, 1), weight=0.125, group_id=group,
                  rollout_id=rollout)


def sibling_samples(groups: int, context: int, response: int) -> list[Sample]:
    rng, found = random.Random(0), []
    for group in range(groups):
        shared = [rng.randrange(SCALED["vocab_size"]) for _ in range(context)]
        found += [sample(f"{group}/{j}", str(group), shared, [rng.randrange(SCALED["vocab_size"]) for _ in range(response)]) for j in range(8)]
    return found


def lookup_samples(template: ChatTemplate, config: Any, tasks: int, chains: bool) -> list[Sample]:
    """Groups of 8 actions at one turn of a task, or of 8 whole episodes of it, by the script that the warm start learns from."""
    found = []
    for task in range(tasks):
        for j in range(8):
            # Up to the turn that is trained all siblings do the same.
            rng, turn = random.Random(f"{task}/{j}"), 0 if chains else task % config.environment.max_turns
            common, environment, builder = random.Random(task), environments.build(config.environment), Append(template)
            observation = environment.reset(task)
            builder.start(environment.system, environment.tools(), observation)
            for number in range(config.environment.max_turns if chains else turn + 1):
                action = environment.demonstrate(rng if number >= turn else common, 0.7 if number >= turn else 0.0)
                response = [*template.encode(action), template.tokenizer.eos_token_id]
                if number >= turn:
                    found.append(sample(f"{task}/{j}/{number}", str(task), list(builder.context()), response, f"{task}/{j}"))
                observation = environment.step(action).observation
                if observation is None:
                    break
                builder.extend(response, observation)
    return found


def one_pass(policy: modeling.Policy, samples: list[Sample], budget: int, how: dict[str, Any]) -> tuple[int, int]:
    """Forward and backward of -sum A log pi: (positions, unique tokens). Leaves the gradient."""
    policy.zero_grad()
    positions = unique = 0
    for make in plan(samples, budget, **how):
        batch = make()
        logprobs, _ = policy(batch.input_ids, batch.rows, batch.columns, batch.labels, 1.0, layout=batch.layout)
        (-(batch.advantages * batch.weights * logprobs[batch.scored]).sum()).backward()
        positions, unique = positions + batch.input_ids.numel(), unique + batch.unique_tokens
    return positions, unique


def gradient(policy: modeling.Policy) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


def compare(name: str, policy: modeling.Policy, samples: list[Sample], budget: int, repetitions: int) -> dict[str, Any]:
    """Medians of alternating passes."""
    ways: list[tuple[str, dict[str, Any]]] = [PADDED, PACKED, UNSHARED]
    tokens = sum(len(s.context_ids) + len(s.response_ids) for s in samples)
    figures: dict[str, Any] = {"samples": len(samples), "micro_batch_tokens": budget, "tokens": tokens}
    gradients = {}
    for way, how in ways:  # also warms up
        figures[f"positions, {way}"], figures["unique"] = one_pass(policy, samples, budget, how)
        gradients[way] = gradient(policy)
    seconds: dict[str, list[float]] = {way: [] for way, _ in ways}
    for _ in range(repetitions):
        for way, how in ways:
            start = time.process_time()
            one_pass(policy, samples, budget, how)
            seconds[way].append(time.process_time() - start)
    exact = gradients["padded"]
    for way, _ in ways:
        figures[f"seconds, {way}"] = round(statistics.median(seconds[way]), 4)
        figures[f"gradient error, {way}"] = float((gradients[way] - exact).norm() / exact.norm())
    figures["speed-up"] = round(statistics.median(a / b for a, b in zip(seconds["padded"], seconds["packed"], strict=True)), 2)
    figures["speed-up, nothing shared"] = round(statistics.median(a / b for a, b in zip(seconds["padded"], seconds[UNSHARED[0]], strict=True)), 2)
    figures["positions / unique"] = round(figures["positions, packed"] / figures["unique"], 4)
    print(f"{name}: {json.dumps(figures)}", flush=True)
    return figures


def profiled(act: Callable[[], object], rows: int = 14) -> list[str]:
    """The operations that took most of the time of one pass."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        act()
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [f"{event.self_cpu_time_total / total:6.1%} {event.self_cpu_time_total / 1e3:9.1f} ms {event.count:6d} x {event.key}"
            for event in events[:rows]]


def targets_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    computed, faster = max(each["positions / unique"] for each in figures.values()), figures.get("siblings", {}).get("speed-up", 0.0)
    return [{"target": "positions / unique tokens <= 1.05 everywhere", "measured": computed, "met": computed <= 1.05},
            {"target": "context 1,024, response 64, 8 siblings: >= 3 x faster than padded", "measured": faster, "met": faster >= 3}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a smaller model, shorter contexts, three repetitions; writes nothing")
    parser.add_argument("--scenes", default="siblings,quickstart,chains", help="some of these; the others' figures stay as they are")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the operations of one pass each way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repetitions = 3 if options.small else options.repetitions
    config = load_config(ROOT / "conf/quickstart.yaml", ["cluster.local_cpus=2"])
    tokenizer = tiny.build_tokenizer(config)
    template = ChatTemplate(tokenizer)
    torch.manual_seed(0)
    quick = modeling.Policy(tiny.build_model(config, tokenizer).eval(), torch.float32)
    shape = {**SCALED, "hidden_size": 64, "num_hidden_layers": 2} if options.small else SCALED
    scaled = modeling.Policy(Qwen3ForCausalLM(Qwen3Config(**shape)).eval(), torch.float32)
    tasks = 8 if options.small else 32
    scenes: dict[str, tuple[modeling.Policy, list[Sample], int]] = {
        "siblings": (scaled, sibling_samples(1, 128 if options.small else 1024, 64), 8704),
        "quickstart": (quick, lookup_samples(template, config, tasks, chains=False), 8192),
        "chains": (quick, lookup_samples(template, config, tasks, chains=True), 8192)}
    path = ROOT / "tests/bench/results/learner.json"
    figures: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() and not options.small else {}
    for name in options.scenes.split(","):
        policy, samples, budget = scenes[name]
        figures[name] = compare(name, policy, samples, budget, repetitions)
        if options.profile:
            for way, how in (PADDED, PACKED):
                figures[name][f"profile, {way}"] = profiled(lambda p=policy, s=samples, b=budget, h=how: one_pass(p, s, b, h))  # type: ignore[misc]
                print("\n".join([f"{name}, {way}", *figures[name][f"profile, {way}"]]), flush=True)
        targets = targets_of(figures)
        if not options.small:
            commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            result = {"what": __doc__.splitlines()[0], "commit": commit, "date": time.strftime("%Y-%m-%d"), "threads": 1,
                      "torch": torch.__version__, "figures": figures, "targets": targets}
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(targets, indent=1))
    return 0 if all(target["met"] for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
