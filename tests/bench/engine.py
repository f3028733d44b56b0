"""The generator and its engine: what order does to a stage with a heavy tail, how full the slots are, what the prefix cache answers, tokens a second.

    python tests/bench/engine.py                    # about three minutes on two cores; writes results/engine.json
    python tests/bench/engine.py --only tail        # in seconds: no model

`tail` counts steps of a simulated engine, so no clock is in it: a stage of groups whose lengths have a heavy tail, what a trunk took being an
imperfect guess at them. `prefix` plays a stage of the lookup task with the tiny model on vLLM. `speed` samples with that model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

import pyarrow as pa  # noqa: E402 - the variables above are read when torch is imported
from answers import whole  # noqa: E402

from actors.generator import Generator  # noqa: E402
from pipelines.branching import requests  # noqa: E402
from pipelines.collect import Ask  # noqa: E402
from pipelines.counts import count_episodes  # noqa: E402
from pipelines.rows import REQUESTS, table_to_groups, tasks_to_table  # noqa: E402
from rtpo_ray import algorithms  # noqa: E402
from rtpo_ray.algorithms.base import Stage  # noqa: E402
from rtpo_ray.types import Completion, Sampling, Task, derive_seed  # noqa: E402

SEED = 3


async def all_tables(made: Generator, rows: pa.Table, ask: Ask) -> list[pa.Table]:
    return [table async for table in made.siblings(rows, ask)]


# --- tail


class Stepped:
    """An engine that counts: each step samples one token of every sequence in its slots; the others wait in the order of their arrival."""

    max_model_len, weight_version = 100_000, 0

    def __init__(self, lengths: dict[int, int], slots: int) -> None:
        self._lengths, self._slots = lengths, slots
        self._open: list[list[Any]] = []  # tokens left, its waiter
        self.ended: dict[int, int] = {}  # step by seed
        self._driver: asyncio.Task[None] | None = None
        self.steps = self.sampled = 0

    async def generate(self, context_ids: Any, sampling: Sampling) -> Completion:
        loop = asyncio.get_running_loop()
        tokens = self._lengths[sampling.seed]
        waiter: asyncio.Future[None] = loop.create_future()
        self._open.append([tokens, waiter])
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        await waiter
        self.ended[sampling.seed] = self.steps
        return Completion(token_ids=(7,) * tokens, logprobs=(-1.0,) * tokens, finish_reason="length", weight_version=0)

    async def _drive(self) -> None:
        while self._open:
            for _ in range(4):
                await asyncio.sleep(0)
            running = self._open[:self._slots]
            self.steps += 1
            self.sampled += len(running)
            for one in running:
                one[0] -= 1
                if not one[0]:
                    one[1].set_result(None)
            self._open = [one for one in self._open if one[0]]

    def check(self) -> None:
        """Never fails."""


def seed_of(row: dict[str, Any], index: int, turn: int) -> int:
    """With which sibling `index` of that request samples its turn."""
    return derive_seed(derive_seed(SEED, f"{row['group_id']}/{index}"), turn)


def tail_once(seed: int, groups: int, siblings: int, slots: int, turns: int, tasks: float, spread: float) -> dict[str, dict[str, float]]:
    """Steps and occupancy of one stage in several orders. tasks, spread: sigma of the logarithm of lengths between tasks, and within one."""
    from chats import chat
    from worlds import Parrot, parrot_engine, settings

    rng = random.Random(seed)
    world = lambda: Parrot(turns)  # noqa: E731
    options = {"name": "g", "make_environment": world, "template": chat("chatml"), "overlong": "error", "concurrency": 4 * slots,
               "settings": settings(max_turns=turns, max_response_tokens=10_000, max_model_len=100_000)}
    maker = Generator(make_engine=lambda: parrot_engine(max_model_len=100_000), **options)
    trunks = whole(maker.episodes(tasks_to_table([Task(task_id=f"t{i}", seed=i) for i in range(groups)]),
                                  Ask(seed=SEED, temperature=1.0, keep_boundaries=True)))
    rows = requests(trunks, Stage(turn=0, n_siblings=siblings, baseline="boundary", with_trunk=False), algorithms.make("rtpo", {}), SEED).to_pylist()
    lengths: dict[int, int] = {}
    for row in rows:
        typical = rng.lognormvariate(3.0, tasks)  # of its task: the trunk's own is one draw of it
        row["expected_tokens"] = round(typical * rng.lognormvariate(0, spread)) * turns
        for index in range(siblings):
            mine = typical * rng.lognormvariate(0, spread)
            for turn in range(turns):
                lengths[seed_of(row, index, turn)] = max(1, round(mine * rng.lognormvariate(0, 0.2)))
    found = {}
    for name, expected, gate, chunk in (("as they come", False, 0, 0), ("begun first", False, slots, 0), ("longest first", True, slots, 0),
                                        ("in chunks", True, slots, groups // 8)):
        engine = Stepped(lengths, slots)
        made = Generator(make_engine=lambda engine=engine: engine, slots=gate, **options)
        table = pa.Table.from_pylist([{**row, "expected_tokens": row["expected_tokens"] if expected else 0} for row in rows], schema=REQUESTS)
        asyncio.run(all_tables(made, table, Ask(seed=SEED, temperature=1.0, chunk=chunk)))
        assert engine.sampled == sum(lengths.values())
        complete = list(itertools.accumulate((max(engine.ended[seed_of(row, index, turns - 1)] for index in range(siblings)) for row in rows), max))
        found[name] = {"steps": engine.steps, "occupancy": engine.sampled / (slots * engine.steps),
                       "handed on": statistics.mean(complete[len(complete) // 8 - 1::len(complete) // 8]) / engine.steps}
        made._loop.call_soon_threadsafe(made._loop.stop)
    maker._loop.call_soon_threadsafe(maker._loop.stop)
    longest = max(sum(lengths[seed_of(row, index, turn)] for turn in range(turns)) for row in rows for index in range(siblings))
    found["no order could be faster"] = {"steps": max(longest, sum(lengths.values()) / slots)}
    return found


def tail(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over draws of the lengths; steps as ratios to the order of arrival, which was the order before."""
    return {"groups": args.groups, "siblings": 8, "slots": args.slots, "turns": 3, "draws": args.repeats,
            "heavy": tail_of(args, 1.0, 0.5), "mild": tail_of(args, 0.3, 0.3)}


def tail_of(args: argparse.Namespace, tasks: float, spread: float) -> dict[str, Any]:
    draws = [tail_once(seed, args.groups, 8, args.slots, 3, tasks, spread) for seed in range(args.repeats)]
    ratios = {name: round(statistics.median(one[name]["steps"] / one["as they come"]["steps"] for one in draws), 3) for name in draws[0]}
    occupancy, handed_on = ({name: round(statistics.median(one[name][what] for one in draws), 3) for name in draws[0] if what in draws[0][name]}
                            for what in ("occupancy", "handed on"))
    return {"steps": ratios, "occupancy": occupancy, "mean share of its steps after which an eighth of the groups could be handed on": handed_on}


# --- the tiny model on vLLM


def tiny(max_num_seqs: int, kv_cache_mb: int) -> tuple[Generator, Any, Any]:
    """A generator on the tiny model, its engine, and the model's configuration."""
    from actors.spawn import chat_template, environment_maker, episode_settings
    from rtpo_ray.config import load_config
    from rtpo_ray.engines.vllm import VllmEngine
    from rtpo_ray.policy.tiny import materialise

    config = load_config(ROOT / "conf/quickstart.yaml")
    path = str(materialise(config))
    engine = VllmEngine(path, dtype="float32", max_model_len=config.generators.max_model_len, max_num_seqs=max_num_seqs, kv_cache_mb=kv_cache_mb,
                        gpu_memory_utilization=0.5, threads=1)

    template = chat_template(config, path)
    made = Generator(name="g", make_engine=lambda: engine, make_environment=environment_maker(config, template), template=template,
                     settings=episode_settings(config), overlong="error", concurrency=4 * max_num_seqs, slots=max_num_seqs)
    return made, engine, config


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """What the cache answered of what it could have, over trunks and then a stage a turn, with and without a push between."""
    from transformers import AutoModelForCausalLM

    from rtpo_ray.policy.tiny import materialise

    made, engine, config = tiny(args.slots, 64)
    weights = AutoModelForCausalLM.from_pretrained(str(materialise(config))).state_dict()
    tasks = tasks_to_table([Task(task_id=f"t{i}", seed=i) for i in range(args.tasks)])
    found: dict[str, Any] = {}
    for pushed in (False, True):
        engine.load_weights(weights.items(), engine.weight_version + 1)
        trunks = whole(made.episodes(tasks, Ask(seed=SEED, temperature=1.0, keep_boundaries=True)))
        counts = count_episodes(trunks)
        found[f"trunks{', again' if pushed else ''}"] = shares(counts.prompt_tokens, counts.shareable_prompt_tokens, counts.cached_prompt_tokens)
        for turn in reversed(range(config.environment.max_turns)):
            if pushed:
                engine.load_weights(weights.items(), engine.weight_version + 1)
            stage = Stage(turn=turn, n_siblings=8, baseline="boundary", with_trunk=False)
            rows = requests(trunks, stage, algorithms.make("rtpo", {}), SEED)
            asyncio.run(made.take_occupancy())
            tables = asyncio.run(all_tables(made, rows, Ask(seed=SEED + turn, temperature=1.0)))
            kept = asyncio.run(made.take_occupancy())
            turns = [one for table in tables for group in table_to_groups(table) for sibling in group.siblings for one in sibling.turns]
            found[f"turn {turn}, {'after a push' if pushed else 'no push since the trunks'}"] = {
                **shares(*(sum(values) for values in zip(*((len(one.context_ids), one.shareable_prompt_tokens, one.cached_prompt_tokens)
                                                           for one in turns), strict=True))),
                "siblings": sum(pa.compute.sum(table["siblings"].combine_chunks().value_lengths()).as_py() for table in tables),
                "occupancy": round(kept["slot_seconds"] / (kept["slots"] * kept["open_seconds"]), 3),
                "of the demand": round(kept["slot_seconds"] / kept["demand_seconds"], 3)}
    engine.close()
    return found


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of 90-token prompts and 64-token responses, all new; vLLM's own drawing of seeded requests against ours, in turn."""
    found: dict[str, Any] = {}
    for slots in args.sequences:
        made, engine, _ = tiny(slots, 128)
        sampler = engine._llm.collective_rpc(lambda worker: worker.model_runner.sampler.topk_topp_sampler)[0]
        ours, rates = sampler.forward, {"stock": [], "ours": []}  # type: ignore[var-annotated]
        sample_batch(made, engine, slots, 0)
        for repeat in range(args.repeats):
            for name in ("stock", "ours") if repeat % 2 else ("ours", "stock"):
                sampler.forward = sampler.stock if name == "stock" else ours
                rates[name].append(sample_batch(made, engine, slots, 2 * repeat + 1 + (name == "ours")))
        engine.close()
        found[f"{slots} sequences"] = {
            "tokens_per_second": round(statistics.median(rates["ours"])),
            "of stock": round(statistics.median(a / b for a, b in zip(rates["ours"], rates["stock"], strict=True)), 3)}
    return found


def sample_batch(made: Generator, engine: Any, slots: int, seed: int) -> float:
    """Tokens a second of one batch."""
    rng = random.Random(seed)

    async def together() -> list[Completion]:
        return await asyncio.gather(*(
            engine.generate([rng.randrange(4, 300) for _ in range(90)],
                            Sampling(temperature=1.0, max_tokens=64, stop_token_ids=(), seed=1000 * seed + number)) for number in range(slots)))

    started = time.perf_counter()
    completions = asyncio.run(made._run(together()))
    return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started)


def shares(prompt: int, shareable: int, cached: int) -> dict[str, float]:
    return {"prompt_tokens": prompt, "shareable": round(shareable / prompt, 3), "cached_of_shareable": round(cached / max(1, shareable), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="parts to measure")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions that medians are taken of")
    parser.add_argument("--groups", type=int, default=128, help="of the stage with a heavy tail, 8 siblings each")
    parser.add_argument("--slots", type=int, default=64, help="sequences sampled at once")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256], help="sampled at once when tokens a second are measured")
    parser.add_argument("--tasks", type=int, default=64, help="of the lookup task")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/engine.json")
    args = parser.parse_args()
    figures = {name: PARTS[name](args) for name in args.only}
    targets = []
    if "tail" in figures:
        ratio = figures["tail"]["heavy"]["steps"]["longest first"]
        targets.append({"target": "longest first takes fewer steps than the order of arrival", "measured": ratio, "met": ratio < 1})
    if "prefix" in figures:
        least = min(one["cached_of_shareable"] for one in figures["prefix"].values())
        targets.append({"target": "the cache answers 95 % of the prompt tokens that it could", "measured": least, "met": least >= 0.95})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    result = {"what": __doc__.splitlines()[0], "commit": commit, "date": time.strftime("%Y-%m-%d"), "figures": figures, "targets": targets}
    print(json.dumps(result, indent=1))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


PARTS = {"tail": tail, "prefix": prefix, "speed": speed}

if __name__ == "__main__":
    main()
