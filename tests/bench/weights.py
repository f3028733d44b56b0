"""A push through the weight channel beside a bare broadcast: the same bytes in the same slices over the same backend.

    python tests/bench/weights.py                              # 540 MB to one and two receivers, and the tiny model; a few minutes on two cores
    python tests/bench/weights.py --buckets 4 16 64 256        # MiB of a bucket, each by itself
    python tests/bench/weights.py --engine FOLDER              # besides, vLLM on that model as the receiver, float32
    python tests/bench/weights.py --models tiny --receivers 1 --repeats 5

A push counts from the header to the hash that all have confirmed, and loads nothing. The bare broadcast sends memory that is there into
memory that is there, up to two slices under way ("bare"), or one after the other ("bare_waiting"). All ranks are processes of this
machine with one thread each. "cpu" are the processor seconds of all ranks together, which a machine that is busy otherwise changes least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
import traceback
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from record import alternate, target, write  # noqa: E402

from rtpo_ray.config import WeightsConfig  # noqa: E402
from rtpo_ray.network import join_store, open_store  # noqa: E402
from rtpo_ray.timeline import Timeline  # noqa: E402
from rtpo_ray.weights.buckets import buckets  # noqa: E402
from rtpo_ray.weights.channel import IN_FLIGHT, WeightChannel  # noqa: E402
from rtpo_ray.weights.hashing import TensorSpec, torch_dtype  # noqa: E402

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
DEADLINE = 280.0  # of one case
SHAPES = {  # layers, width, of the MLP, of keys and values, tokens
    "135M": (30, 576, 1536, 192, 49152),
    "tiny": (2, 128, 384, 64, 512),
}


def specs_of(model: str) -> list[TensorSpec]:
    """Weights of a Llama with tied embeddings, float32."""
    layers, width, inner, narrow, tokens = SHAPES[model]
    found = [("embed_tokens", (tokens, width))]
    for n in range(layers):
        found += [(f"{n}.{name}", shape) for name, shape in {
            "q": (width, width), "k": (narrow, width), "v": (narrow, width), "o": (width, width), "gate": (inner, width), "up": (inner, width),
            "down": (width, inner), "norm": (width,), "norm2": (width,)}.items()]
    return [TensorSpec(name, tuple(shape), "float32") for name, shape in [*found, ("norm", (width,))]]


class Bare:
    """Broadcasts of the channel's slices from and into memory that is kept."""

    def __init__(self, name: str, rank: int, world: int, port: int, sizes: list[int]) -> None:
        self.sizes = sizes
        self.memory = torch.ones(max(sizes), dtype=torch.uint8)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore(name, join_store(HOST, port, 60.0)), rank, world, TIMEOUT)
        self.options = dist.BroadcastOptions()
        self.options.rootRank, self.options.rootTensor, self.options.timeout = 0, 0, TIMEOUT

    def meet(self) -> None:
        self.group.barrier().wait(TIMEOUT)

    def broadcast(self, in_flight: int) -> float:
        """Seconds until everyone has everything."""
        self.meet()
        started, works = time.perf_counter(), []
        for size in self.sizes:
            works.append(self.group.broadcast([self.memory[:size]], self.options))
            if len(works) == in_flight:
                works.pop(0).wait(TIMEOUT)
        for work in works:
            work.wait(TIMEOUT)
        self.meet()
        return time.perf_counter() - started


def play(rank: int, world: int, port: int, model: str, bucket_mb: int, repeats: int) -> dict[str, Any]:
    """One rank's medians; those of rank 0 count."""
    torch.set_num_threads(1)
    specs, bucket_bytes = specs_of(model), bucket_mb << 20
    sizes = [piece.stop - piece.start for bucket in buckets(specs, bucket_bytes) for piece in bucket.slices(bucket_bytes)]
    tensors = {spec.name: torch.randn(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs} if rank == 0 else {}
    bare = Bare("bare", rank, world, port, sizes)
    channel = WeightChannel("channel", rank, world, HOST, port, "cpu", 60.0, bucket_bytes)
    times: list[Any] = []
    cpu: dict[str, list[float]] = {"bare": [], "push": []}

    def plain() -> float:
        spent = time.process_time()
        took = bare.broadcast(IN_FLIGHT)
        cpu["bare"].append(time.process_time() - spent)
        return took

    def push() -> float:
        bare.meet()
        started, spent = time.perf_counter(), time.process_time()
        if rank == 0:
            channel.send(len(times), specs, tensors.items())
            times.append(channel.times)
        else:
            incoming = channel.receive()
            for _ in incoming.tensors():
                pass
            times.append(incoming.times)
        took = time.perf_counter() - started
        bare.meet()
        cpu["push"].append(time.process_time() - spent)
        return took

    found: dict[str, Any] = dict(alternate(repeats, bare=plain, bare_waiting=lambda: bare.broadcast(1), push=push))
    found["cpu"] = {name: statistics.median(values[1:]) for name, values in cpu.items()}
    middle = sorted(times[1:], key=lambda each: each.seconds)[repeats // 2]
    found["phases"] = {name: round(getattr(middle, name), 4) for name in ("bytes", "seconds", "gather", "copy", "wire", "hash", "load", "confirm")}
    return found


def play_engine(rank: int, world: int, port: int, folder: str, bucket_mb: int, repeats: int) -> dict[str, Any]:
    """Rank 1: seconds after the last bucket came, and of its loading, and in which the engine loaded nothing, medians; rank 0 sends the
    folder's weights."""
    torch.set_num_threads(1)
    timeline = Timeline(f"rank {rank}")
    engine: Any = None
    if rank:
        from rtpo_ray.engines.vllm import VllmEngine

        engine = VllmEngine(folder, dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_mb=64, gpu_memory_utilization=0.5, threads=1)
    else:
        from transformers import AutoModelForCausalLM

        named = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        specs = [TensorSpec(name, tuple(value.shape), "float32") for name, value in named.items()]
    channel = WeightChannel("channel", rank, world, HOST, port, "cpu", 120.0, bucket_mb << 20, timeline)

    def pushed() -> dict[str, float]:
        timeline.take()
        if rank == 0:
            channel.send(1, specs, named.items())
            return {"push": channel.times.seconds, **{name: getattr(channel.times, name) for name in ("wire", "confirm")}}
        incoming = channel.receive()
        engine.load_weights(incoming.tensors(), 1)
        spans = timeline.take()
        arrived = max(span.end for span in spans if span.name == "bucket")
        loads = [span.end - span.start for span in spans if span.name == "load"]
        loaded = max(span.end for span in spans if span.name == "load")
        times = incoming.times
        # vLLM's own last work on all of the model follows once the iterator is at its end
        return {"receive": times.seconds, "wire": times.wire, "hash": times.hash, "load": times.load, "buckets": float(len(loads)),
                "last_bucket_to_loaded": loaded - arrived, "last_bucket_load": loads[-1], "mean_bucket_load": sum(loads) / len(loads),
                "idle": times.seconds - times.load}

    pushed()
    found = [pushed() for _ in range(repeats)]
    return {name: sorted(each[name] for each in found)[repeats // 2] for name in found[0]}


def _serve(pipe: Any, function: Any, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except Exception:  # noqa: BLE001 - raised again by whoever started the rank
        pipe.send((False, traceback.format_exc()))


def together(function: Any, world: int, *arguments: Any) -> list[dict[str, Any]]:
    """`function(rank, world, port, *arguments)` in `world` processes; results in rank order. RuntimeError with a rank's traceback."""
    context = multiprocessing.get_context("spawn")
    store = open_store(HOST, 60.0)
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, function, (rank, world, store.port, *arguments)), daemon=True)
        process.start()
        ranks.append((process, ours))
    end, replies = time.monotonic() + DEADLINE, []
    try:
        for rank, (_, pipe) in enumerate(ranks):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise RuntimeError(f"rank {rank} of {world} was not done after {DEADLINE:g} s")
            good, reply = pipe.recv()
            if not good:
                raise RuntimeError(f"rank {rank} of {world}:\n{reply}")
            replies.append(reply)
    finally:
        for process, _ in ranks:
            process.join(0 if len(replies) < world else 20)
            process.kill()
    return replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=["135M", "tiny"])
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--buckets", type=int, nargs="*", default=[WeightsConfig().bucket_mb], help="MiB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--engine", default="", help="folder of a model that vLLM receives as well")
    parser.add_argument("--name", default="weights", help="of the file of results")
    args = parser.parse_args()
    rows, targets = [], []
    for model in args.models:
        for receivers in args.receivers:
            for mb in args.buckets:
                sender, *others = together(play, receivers + 1, model, mb, args.repeats)
                cpu = {name: sum(each["cpu"][name] for each in (sender, *others)) for name in ("bare", "push")}
                rows.append({"model": model, "receivers": receivers, "bucket_mb": mb, **sender, "cpu": cpu,
                             "receiver_phases": max((other["phases"] for other in others), key=lambda phases: phases["seconds"])})
                print(rows[-1], flush=True)
                if model == "135M" and mb == WeightsConfig().bucket_mb:
                    targets.append(target(f"540 MB to {receivers} in buckets of {mb} MiB: at most 1.3 x a bare broadcast", sender["push/bare"], 1.3))
    figures: dict[str, Any] = {"channel": rows}
    if args.engine:
        figures["engine"] = []
        for mb in args.buckets:
            sender, receiver = together(play_engine, 2, args.engine, mb, 5)
            figures["engine"].append({"bucket_mb": mb, "sender": sender, "receiver": receiver})
            print(figures["engine"][-1], flush=True)
            targets.append(target(f"engine after the last bucket of {mb} MiB: at most one bucket's loading",
                                  receiver["last_bucket_to_loaded"] / receiver["last_bucket_load"], 1.1))
    write(args.name, "a weight push beside a bare broadcast", figures, targets)


if __name__ == "__main__":
    main()
