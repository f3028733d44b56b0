"""How the cost of a stage grows: with its groups, with turns, with the length of contexts, with generators, with learner ranks.

    python tests/bench/growth.py                    # about eight minutes on two cores; writes results/growth.json
    python tests/bench/growth.py --only groups turns

Each part is the real one: the pipeline's functions, a generator playing episodes, the engine, the learner; only the many generators of `cluster`
answer at once, without an engine. What is fitted is the exponent p of seconds = c x^p, where x is the natural size of the work and seconds are of
the whole stage, so that p = 1 is linear. Sizes are measured in turns, five times each, and the medians fitted. CPU seconds are meant where
several processes share this machine's cores. x is

    groups       groups of a stage (8 siblings each), cut into blocks as the coordinator does: requests, credit and counting
    turns        tokens that a whole sweep of RTPO generates, K = 2 to 16: they grow with K^2, since stage k continues its siblings for K - k turns,
                 and the contexts that are recorded beside them with K^3
    prefill, learner    floating-point operations of so many sequences of 64 to 2,048 tokens, those of attention grow with the square of the length
    generators   1 to 3 engines with as many siblings each: CPU seconds of all of them, while all three are at work, so that the cores are as busy
                 whatever is counted; and wall seconds with so many at work, for which this machine has two cores
    cluster      8 to 64 actors, and 256 members that share 32, with 256 siblings each: CPU seconds of the coordinator and of the pool
    ranks        1 to 3 learner ranks with as many samples each: CPU seconds of all of them
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = PATHS = [str(ROOT), str(ROOT / "tests/bench"), str(ROOT / "tests/unit")]
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(PATHS),
               "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import pyarrow as pa  # noqa: E402 - the variables above are read when torch is imported
from record import RESULTS, exponent, target, write  # noqa: E402

MOST = 1.1  # exponent: linear, with room for noise
Times = dict[float, float]


def alternating(sizes: Sequence[int], function: Callable[[int], float], repeats: int) -> Times:
    """Median of `function(size)` for every size, taken in turns after one round that does not count."""
    found: dict[float, list[float]] = {size: [] for size in sizes}
    for number in range(repeats + 1):
        for size in sizes:
            seconds = function(size)
            if number:
                found[size].append(seconds)
    return {size: statistics.median(values) for size, values in found.items()}


def cpu(function: Callable[[], Any]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def tables(answer: Any) -> pa.Table:
    """What a generator's coroutine, or stream of parts, gives."""
    async def collect() -> pa.Table:
        if inspect.isasyncgen(answer):
            return pa.concat_tables([part async for part in answer])
        return await answer
    return asyncio.run(collect())


# --- the pipeline


def groups(repeats: int) -> dict[str, Any]:
    from noop import NoopGenerator
    from records import RTPO, trunk

    from pipelines.branching import assemble, requests
    from pipelines.collect import Ask
    from pipelines.counts import count_stage
    from pipelines.credit import credit_groups
    from pipelines.rows import rollouts_to_table
    from rtpo_ray.algorithms.base import Stage

    stage = Stage(turn=0, n_siblings=8, baseline="boundary", with_trunk=False)
    source = NoopGenerator()

    def once(count: int) -> float:
        blocks = [rollouts_to_table([trunk(f"t{number}/0", 1.0) for number in range(first, first + 32)]) for first in range(0, count, 32)]

        def work() -> None:
            for trunks in blocks:
                wanted = requests(trunks, stage, RTPO, 0)
                samples = credit_groups(assemble(trunks, tables(source.siblings(wanted, Ask(seed=0, temperature=1.0))), stage), algorithm=RTPO)
                assert count_stage(samples).siblings == 8 * 32
        return cpu(work)

    times = alternating([64, 128, 256, 512, 1024], once, repeats)
    return {"x": "groups", "seconds": "CPU of the pipeline's functions", "times": times, "exponent": exponent(list(times), list(times.values())),
            "s_per_1000_siblings": {size: seconds / (8 * size) * 1000 for size, seconds in times.items()}}


def turns(repeats: int) -> dict[str, Any]:
    from chats import chat
    from records import RTPO
    from worlds import Parrot, parrot_engine, settings

    from actors.generator import Generator
    from pipelines.branching import assemble, requests
    from pipelines.collect import Ask
    from pipelines.credit import credit_groups
    from pipelines.rows import table_to_rollouts, tasks_to_table
    from rtpo_ray.algorithms.rtpo import Rtpo
    from rtpo_ray.types import Task

    tasks = tasks_to_table([Task(task_id=f"t{number}", seed=number) for number in range(4)])
    handled: dict[int, float] = {}
    generated: dict[int, float] = {}

    def once(most: int) -> float:
        made = Generator(name="g", make_engine=parrot_engine, make_environment=lambda: Parrot(most), template=chat("chatml"),
                         settings=settings(max_turns=most, max_model_len=4000), overlong="error", concurrency=256)
        ask = Ask(seed=1, temperature=1.0, keep_boundaries=True)
        tokens = [0, 0]

        def work() -> None:
            trunks = tables(made.episodes(tasks, ask))
            for stage in Rtpo(n_siblings=4).stages(most):
                found = assemble(trunks, tables(made.siblings(requests(trunks, stage, RTPO, 0), Ask(seed=2, temperature=1.0))), stage)
                credit_groups(found, algorithm=RTPO)
                siblings = pa.Table.from_struct_array(pa.chunked_array([chunk.flatten() for chunk in found["siblings"].chunks]))
                count(siblings)
            count(trunks)

        def count(rollouts: pa.Table) -> None:
            for rollout in table_to_rollouts(rollouts):
                tokens[0] += sum(len(turn.context_ids) + len(turn.response_ids) for turn in rollout.turns)
                tokens[1] += sum(len(turn.response_ids) for turn in rollout.turns)

        seconds = cpu(work)
        made._loop.call_soon_threadsafe(made._loop.stop)
        handled[most], generated[most] = tokens
        return seconds

    times = alternating([2, 4, 8, 16], once, repeats)
    return {"x": "generated tokens, of K = 2, 4, 8, 16", "seconds": "CPU of a sweep: generator without an engine's cost, pipeline",
            "times": times, "handled_tokens": handled, "generated_tokens": generated,
            "exponent": exponent([generated[k] for k in times], list(times.values())),
            "exponent_by_handled_tokens": exponent([handled[k] for k in times], list(times.values()))}


# --- the length of contexts

LENGTHS = (64, 128, 256, 512, 1024, 2048)
HIDDEN, LAYERS, HEADS, VOCABULARY = 128, 2, 4, 1024


def model(folder: str) -> str:
    """A random Qwen3 with room for 4,096 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                         num_key_value_heads=HEADS, head_dim=HIDDEN // HEADS, max_position_embeddings=4096, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def operations(length: int, scored: int) -> float:
    """Of one forward pass over a sequence: 2 a weight and position (the head's where tokens are scored), and attention's 4 x hidden for every pair
    of positions of a layer."""
    weights = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * 3 * HIDDEN)
    return 2.0 * weights * length + 2.0 * VOCABULARY * HIDDEN * scored + 4.0 * LAYERS * HIDDEN * length**2


def samples(count: int, length: int, response: int = 32) -> list[Any]:
    from rtpo_ray.types import Sample, context_hash

    rng, made = random.Random(length), []
    for number in range(count):
        context, answer = ([rng.randrange(VOCABULARY) for _ in range(size)] for size in (length - response, response))
        made.append(Sample(sample_id=f"s{number}", context_ids=context, context_hash=context_hash(context), response_ids=answer,
                           engine_logprobs=[-7.0] * response, advantage=rng.uniform(-1, 1), weight=1.0))
    return made


def learner(repeats: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from gloo import learner_config

    from rtpo_ray.algorithms.base import Objective
    from rtpo_ray.policy.learner import Learner, init_distributed

    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        init_distributed(0, 1, f"file://{folder}/meet", "cpu", 60)
        built = Learner(model(f"{folder}/model"), learner_config(micro_batch_tokens=4096, lr=1e-9), objective=Objective(), dtype="float32",
                        temperature=1.0, device="cpu")
        given = {length: samples(8, length) for length in LENGTHS}
        times = alternating(LENGTHS, lambda length: cpu(lambda: built.update(given[length], 4, 8, 0)), repeats)
        dist.destroy_process_group()
    work = [3 * 8 * operations(length, 32) for length in LENGTHS]
    return {"x": "operations", "seconds": "CPU of an update of 8 samples of 64 to 2,048 tokens", "times": times,
            "exponent": exponent(work, list(times.values())), "exponent_by_tokens": exponent(LENGTHS, list(times.values()))}


def prefill(repeats: int) -> dict[str, Any]:
    from rtpo_ray.engines.vllm import VllmEngine
    from rtpo_ray.types import Sampling

    number = iter(range(10**6))

    async def play(engine: Any) -> Times:
        async def once(length: int) -> float:
            rng = random.Random(next(number))  # contexts are new every time, so nothing is found in the cache
            started = time.process_time()
            await asyncio.gather(*(engine.generate([rng.randrange(VOCABULARY) for _ in range(length)],
                                                   Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(), seed=index)) for index in range(16)))
            return time.process_time() - started

        found: dict[float, list[float]] = {length: [] for length in LENGTHS}
        for round_number in range(repeats + 1):
            for length in LENGTHS:
                seconds = await once(length)
                if round_number:
                    found[length].append(seconds)
        return {length: statistics.median(values) for length, values in found.items()}

    with tempfile.TemporaryDirectory() as folder:
        engine = VllmEngine(model(f"{folder}/model"), dtype="float32", max_model_len=2304, max_num_seqs=16, kv_cache_mb=256,
                            gpu_memory_utilization=0.9, threads=1)
        times = asyncio.run(play(engine))
        engine.close()
    work = [16 * operations(length, 1) for length in LENGTHS]
    return {"x": "operations", "seconds": "CPU of 16 responses of 4 tokens after contexts of 64 to 2,048", "times": times,
            "exponent": exponent(work, list(times.values())), "exponent_by_tokens": exponent(LENGTHS, list(times.values()))}


# --- processes


def engine_process(pipe: Any, path: str) -> None:
    """An engine that samples so many responses of 16 tokens when it is asked to; answers with its CPU seconds."""
    from rtpo_ray.engines.vllm import VllmEngine
    from rtpo_ray.types import Sampling

    async def serve() -> None:
        engine = VllmEngine(path, dtype="float32", max_model_len=160, max_num_seqs=256, kv_cache_mb=64, gpu_memory_utilization=0.9, threads=1)
        pipe.send("ready")
        while count := pipe.recv():
            started, rng = time.process_time(), random.Random(0)
            await asyncio.gather(*(engine.generate([rng.randrange(VOCABULARY) for _ in range(64)],
                                                   Sampling(temperature=1.0, max_tokens=16, stop_token_ids=(), seed=seed)) for seed in range(count)))
            pipe.send(time.process_time() - started)
        engine.close()
    asyncio.run(serve())


def generators(repeats: int) -> dict[str, Any]:
    context, each = multiprocessing.get_context("spawn"), 256
    with tempfile.TemporaryDirectory() as folder:
        path, members = model(f"{folder}/model"), []
        for _ in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=engine_process, args=(theirs, path), daemon=True)
            process.start()
            members.append((process, ours))
        assert all(pipe.poll(240) and pipe.recv() == "ready" for _, pipe in members), "an engine did not start in 240 s"

        def work(count: int, busy: int) -> tuple[float, float]:
            """CPU seconds of `count` engines, and wall seconds, while `busy` of them work."""
            started = time.perf_counter()
            for _, pipe in members[:busy]:
                pipe.send(each)
            assert all(pipe.poll(120) for _, pipe in members[:busy]), "an engine did not answer in 120 s"
            return sum([pipe.recv() for _, pipe in members[:busy]][:count]), time.perf_counter() - started

        times = alternating([1, 2, 3], lambda count: work(count, 3)[0], repeats)
        walls = alternating([1, 2, 3], lambda count: work(count, count)[1], repeats)
        for process, pipe in members:
            pipe.send(0)
            process.join(30)
    per_1000 = {size: 1000 * seconds / (size * each) for size, seconds in walls.items()}
    return {"x": "engines, 256 responses each", "seconds": "CPU of all engines", "times": times, "wall_s_per_1000_siblings": per_1000,
            "exponent": exponent(list(times), list(times.values()))}


MEMBERS = (8, 16, 32, 64, 256)  # of the pool; more than 64 share 32 processes


def cluster(repeats: int, members: Sequence[int] = MEMBERS) -> dict[str, Any]:
    import coordinator as bench
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False, logging_level="ERROR",
             _system_config=bench.KEEP_WORKERS)
    try:
        bench.quiet_ray_data()
        rows = [bench.measure(count, count if count <= 64 else 32, bench.EACH * count, repeats) for count in members]
    finally:
        ray.shutdown()
    found: dict[str, Any] = {"x": "generators, 256 siblings each", "seconds": "CPU of a stage, of the coordinator and of the pool"}
    for who in ("coordinator", "pool"):
        times = {row["generators"]: row[f"{who}_cpu_s_per_1000"] * row["siblings"] / 1000 for row in rows}
        found |= {f"{who}_times": times, f"{who}_exponent": exponent(list(times), list(times.values()))}
    found["wall_s_per_1000_siblings"] = {row["generators"]: row["wall_s_per_1000"] for row in rows}
    return found | {"exponent": max(found["coordinator_exponent"], found["pool_exponent"])}


def of_rank(rank: int, world: int, path: str, each: int) -> float:
    """CPU seconds of one rank's part of an update."""
    from dataclasses import replace

    from gloo import learner_config

    from rtpo_ray.algorithms.base import Objective
    from rtpo_ray.policy.learner import Learner

    built = Learner(path, learner_config(micro_batch_tokens=8192, lr=1e-9), objective=Objective(), dtype="float32", temperature=1.0, device="cpu")
    mine = [replace(sample, sample_id=f"{rank}:{sample.sample_id}") for sample in samples(each, 256)]
    built.update(mine, 4, each * world, 0)
    return cpu(lambda: built.update(mine, 4, each * world, 0))


def ranks(repeats: int) -> dict[str, Any]:
    from gloo import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        path = model(f"{folder}/model")
        times = alternating([1, 2, 3], lambda world: sum(run_ranks(world, of_rank, path, 64, deadline=120)), repeats)
    return {"x": "learner ranks, 64 samples of 256 tokens each", "seconds": "CPU of all ranks in an update", "times": times,
            "exponent": exponent(list(times), list(times.values()))}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {part.__name__: part for part in (groups, turns, learner, prefill, generators, ranks, cluster)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of every size (5)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts; the others stay as they were in the results")
    parser.add_argument("--members", type=int, nargs="+", default=list(MEMBERS), help="of the pool of cluster, in turn")
    args = parser.parse_args()
    parts = PARTS | {"cluster": partial(cluster, members=args.members)}
    kept = RESULTS / "growth.json"
    found: dict[str, Any] = json.loads(kept.read_text())["figures"] if kept.exists() else {}
    for name in args.only:
        started = time.perf_counter()
        found[name] = parts[name](args.repeats)
        print(f"{name}: exponent {found[name]['exponent']:.2f} of {found[name]['seconds']} by {found[name]['x']} "
              f"({time.perf_counter() - started:.0f} s)\n   {found[name]}", flush=True)
        write("growth", "seconds of a stage against its size: exponents, 1 is linear", found,
              [target(f"{each}: seconds grow at most linearly with {part['x']}", part["exponent"], MOST) for each, part in found.items()])


if __name__ == "__main__":
    main()
