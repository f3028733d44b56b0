"""The sampling engine: vLLM's V1 engine inside this process, driven by the event loop that awaits the responses.

    generate() x N  --add_request-->  scheduler  --step()--> finished responses --set_result--> generate() returns
         ^                                           |
         '------- an episode's next turn joins the next batch (one event loop, no barrier) <--'

One driver task steps the engine while requests are open and yields between steps, so an episode whose turn is finished
continues at once and its next turn is in the following batch. Everything runs on one thread: a step blocks the event loop
for as long as one forward pass takes (about 50 ms for a tiny model with 256 sequences on one core), and in exchange no two
threads fight over the interpreter. vLLM is imported in the constructor and nowhere else in the project.

What differs on CPUs, each measured: eager mode (compiling takes minutes), no chunked prefill (vLLM 0.32 fails on a prompt
that is split while its request has a seed), key-value blocks of 32 tokens instead of 128 (siblings share short contexts),
and a tied output head that keeps a packed copy of its weight, which a weight push must refresh.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtpo_ray.engines.noise import seed_by_position
from rtpo_ray.engines.prefixes import Prefixes
from rtpo_ray.errors import EngineError
from rtpo_ray.types import Completion, Sampling

if TYPE_CHECKING:
    import torch

CPU_BLOCK_TOKENS = 32  # the smallest block that vLLM's CPU attention accepts
CPU_STEP_TOKENS = 4096  # prompt tokens of one step: 2048 to 8192 are within noise, 1024 is slower, and longer steps block the event loop
LEAST_TEMPERATURE = 0.01  # vLLM silently raises smaller ones to this
YIELDS_PER_STEP = 4  # event loop turns between steps: a finished turn gives its slot back, someone is let in, wakes and asks


@dataclass(slots=True)
class _Request:
    """A response under way. It is put together here: of 256 sequences vLLM's own collecting takes a seventh of what a step costs
    outside the model."""

    future: asyncio.Future[Completion]
    context_ids: Sequence[int]
    shareable: int
    cached: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmEngine:
    """A sampling engine on one device. All methods are called from one event loop, the constructor from any thread.

    Arguments: `model_path` a Hugging Face folder or name; `dtype` "float32" or "bfloat16" (float32 on CPUs: bfloat16
    log-probabilities are 0.1 off); `max_model_len` tokens of context + response; `max_num_seqs` responses sampled at once;
    `kv_cache_mb` key-value cache in MiB, 0 for as much as `gpu_memory_utilization` (a share of the device) allows;
    `threads` compute threads on CPUs (start the process with the same OMP_NUM_THREADS); `weight_version` of the weights in
    `model_path`. Raises EngineError when vLLM cannot start the model, with vLLM's reason.
    """

    def __init__(self, model_path: str, *, dtype: str, max_model_len: int, max_num_seqs: int, kv_cache_mb: int,
                 gpu_memory_utilization: float, threads: int, seed: int = 0, weight_version: int = 0) -> None:
        self.max_model_len = max_model_len
        self._weight_version = weight_version
        self._ids = itertools.count()
        self._open: dict[str, _Request] = {}  # by vLLM's id
        self._driver: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # of a step; final
        self._bad_weights: Exception | None = None  # of a weight push; a later complete push repairs it
        self._llm: Any = None
        _set_environment(model_path, threads)
        try:
            self._llm, self._on_cpu = _start(
                model_path, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=seed,
                kv_cache_memory_bytes=kv_cache_mb * 2**20 or None, gpu_memory_utilization=gpu_memory_utilization)
            self._vocab_size: int = self._llm.model_config.get_vocab_size()
            self._prefixes = Prefixes(self._llm.vllm_config.cache_config.block_size)
        except Exception as error:  # vLLM raises anything from pydantic's errors to RuntimeError; the cause is chained
            raise EngineError(f"vLLM could not start {model_path!r} ({dtype}, max_model_len {max_model_len}, max_num_seqs {max_num_seqs}, "
                              f"kv_cache_mb {kv_cache_mb}): {error}") from error

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next sampled token uses."""
        return self._weight_version

    async def generate(self, context_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one response to `context_ids` [C]; concurrent calls share each forward pass.

        The log-probabilities are those of softmax(logits / temperature), the distribution that was sampled from. At
        temperature 0 the response is greedy and the log-probabilities are the model's own, those of softmax(logits). The
        model's generation_config and its own end-of-text token are ignored: only `sampling` says when a response stops.
        The same request gives the same ids in any batch, up to rounding. Cancelling the call frees the request.

        Raises EngineError when the context leaves no room for max_tokens, when vLLM refuses the request, when a step fails
        (every waiting call gets it, chained to the cause) and, from then on, on every call.
        """
        llm = self._usable()
        self._check_request(context_ids, sampling)
        loop = asyncio.get_running_loop()
        driver = self._driver if self._driver is not None and not self._driver.done() else None
        if driver is not None and driver.get_loop() is not loop:
            raise EngineError("generate() was called from a second event loop while the first has open requests; use one loop per engine")
        try:
            request_id = llm.add_request(f"r{next(self._ids)}", {"type": "token", "prompt_token_ids": list(context_ids)}, _sampling_params(sampling))
        except Exception as error:  # vLLM's refusals have no common base class; the cause is chained
            raise EngineError(f"vLLM refused a request of {len(context_ids)} context tokens with {sampling}: {error}") from error
        request = self._open[request_id] = _Request(loop.create_future(), context_ids, self._prefixes.shareable(context_ids))
        self._prefixes.add(context_ids)  # vLLM shares a block from the step on in which it is computed
        if driver is None:
            self._driver = loop.create_task(self._drive())
        try:
            return await request.future
        finally:
            if self._open.pop(request_id, None) is not None:  # cancelled: whoever resolves a future also removes it
                llm.abort_request([request_id], internal=True)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight in place (Hugging Face names, full shapes, any device or dtype) and take `version`.

        `tensors` is consumed as it comes, so it may receive them from elsewhere. Cached prefixes are dropped. Raises
        EngineError when requests are open (nothing is changed then), and when a weight is missing, unknown or unloadable:
        the engine then refuses to sample until a complete push succeeds, and keeps its old version number.
        """
        if self._failure is not None or self._llm is None:
            self._usable()
        if self._open:
            raise EngineError(f"weights of version {version} arrived while {len(self._open)} requests are open; await or cancel them first")
        self._bad_weights = EngineError(f"the push of version {version} did not finish")  # whatever stops it, until the last line
        try:
            (problem,) = self._llm.collective_rpc(_reload, args=(tensors, self._on_cpu))
        except Exception as error:  # of vLLM's loaders or of the iterator; the cause is chained
            self._bad_weights = error
            raise EngineError(f"weights of version {version} could not be loaded: {error}") from error
        if not problem and not self._llm.reset_prefix_cache():  # cannot happen without open requests, but would be silent
            problem = "vLLM could not drop its cached prefixes, whose keys and values belong to the old weights"
        if problem:
            self._bad_weights = EngineError(f"weights of version {version}: {problem}")
            raise self._bad_weights
        self._bad_weights = None
        self._prefixes.clear()
        self._weight_version = version

    def close(self) -> None:
        """Free memory and threads. Open requests fail with EngineError. Closing twice is fine."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
        self._fail_open(EngineError("the engine was closed"))
        llm.engine_core.shutdown()
        del llm
        gc.collect()  # vLLM's objects form cycles that hold the weights and the cache

    def check(self) -> None:
        """Raise EngineError when the engine has failed for good and must be replaced."""
        if self._failure is not None:
            raise EngineError(f"the engine failed earlier and must be replaced: {self._failure}") from self._failure

    def _usable(self) -> Any:
        """vLLM's engine, or EngineError with what made it unusable."""
        self.check()
        if self._bad_weights is not None:
            raise EngineError(f"the last weight push failed, push all weights again: {self._bad_weights}") from self._bad_weights
        if self._llm is None:
            raise EngineError("the engine is closed")
        return self._llm

    def _check_request(self, context_ids: Sequence[int], sampling: Sampling) -> None:
        """What vLLM would accept, and then answer with something else than was asked for or die of."""
        if not len(context_ids):
            raise EngineError("the context has 0 tokens; expected at least 1")
        if min(context_ids) < 0 or max(context_ids) >= self._vocab_size:  # unchecked by vLLM without a tokenizer; the step would fail
            raise EngineError(f"the context has token ids {min(context_ids)} to {max(context_ids)}; expected 0 to {self._vocab_size - 1}, "
                              "the model's vocabulary")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens is {sampling.max_tokens}; expected at least 1")
        if len(context_ids) + sampling.max_tokens > self.max_model_len:
            raise EngineError(f"context of {len(context_ids)} tokens + max_tokens {sampling.max_tokens} exceeds max_model_len "
                              f"{self.max_model_len}; shorten the context, ask for fewer tokens or raise max_model_len")
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise EngineError(f"temperature {sampling.temperature} is below {LEAST_TEMPERATURE}, which vLLM would silently use instead; "
                              "use 0 for greedy")

    async def _drive(self) -> None:
        """Step while requests are open. A failing step fails every waiting call: nothing waits for ever."""
        while self._open and self._llm is not None:
            try:
                for output in _step(self._llm, self._on_cpu):
                    self._take(output)
            except Exception as error:  # noqa: BLE001 - a step may raise anything; every waiter gets it as the cause
                self._failure = error
                self._fail_open(error)
                return
            for _ in range(YIELDS_PER_STEP):
                await asyncio.sleep(0)

    def _take(self, output: Any) -> None:
        """What a step added to one request. A request that was cancelled meanwhile is not here any more."""
        request = self._open.get(output.request_id)
        if request is None:
            return
        request.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            request.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if request.cached is None and output.prefill_stats is not None:
            request.cached = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._llm.output_processor.abort_requests([output.request_id], internal=True)  # only forgets it: its core has already
            if not request.future.done():
                self._resolve(request, str(output.finish_reason))

    def _resolve(self, request: _Request, finish_reason: str) -> None:
        """Hand a finished request to its waiter."""
        if finish_reason not in ("stop", "length"):
            request.future.set_exception(EngineError(f"vLLM ended a request with {finish_reason!r} after {len(request.token_ids)} tokens"))
        elif not math.isfinite(sum(request.logprobs)):
            request.future.set_exception(EngineError(
                f"non-finite log-probabilities at weight version {self._weight_version}: the weights hold NaN or infinity"))
        else:
            self._prefixes.add((*request.context_ids, *request.token_ids[:-1]))
            request.future.set_result(Completion(
                token_ids=tuple(request.token_ids), logprobs=tuple(request.logprobs), finish_reason=finish_reason,
                weight_version=self._weight_version, cached_prompt_tokens=request.cached or 0, shareable_prompt_tokens=request.shareable))

    def _fail_open(self, cause: Exception) -> None:
        """Give every waiting call its own EngineError: one exception object raised in many tasks mixes their tracebacks."""
        futures = [request.future for request in self._open.values() if not request.future.done()]
        self._open.clear()
        for future in futures:
            error = EngineError(f"the engine lost {len(futures)} requests: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            future.set_exception(error)


def _set_environment(model_path: str, threads: int) -> None:
    """What vLLM and its libraries read while they are imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: starts in seconds, takes weights by reference
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(model_path).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing to fetch; without it every start waits for the network


def _start(model_path: str, **arguments: Any) -> tuple[Any, bool]:
    """vLLM's engine, and whether it runs on a CPU."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        step_tokens = max(CPU_STEP_TOKENS, arguments["max_model_len"], arguments["max_num_seqs"])
        arguments |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": step_tokens,
                      "block_size": CPU_BLOCK_TOKENS}
    llm = LLMEngine.from_engine_args(EngineArgs(
        model=model_path,
        skip_tokenizer_init=True,  # tokens in, tokens out
        generation_config="vllm",  # not the model's own sampling defaults
        logprobs_mode="processed_logprobs",  # after the temperature: what was sampled from
        enable_prefix_caching=True,
        async_scheduling=False,  # a step scheduled ahead could outlive its requests and overlap a weight push
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **arguments,
    ))
    if on_cpu:
        llm.collective_rpc(seed_by_position)
    return llm, on_cpu


def _step(llm: Any, on_cpu: bool) -> list[Any]:
    """One forward pass; returns what it added to each request."""
    if not on_cpu:
        return list(llm.engine_core.get_output().outputs)
    import torch

    with torch.compiler.set_stance("force_eager"):  # vLLM compiles one small count: 2 s at the first step, and a C++ compiler
        return list(llm.engine_core.get_output().outputs)


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=sampling.seed, stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # this object belongs to one request; vLLM's deep copy would cost more than building it
    )


def _reload(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]], on_cpu: bool) -> str:
    """Load `tensors` into the worker's model; returns what was wrong with their names, or "". Runs inside vLLM's worker."""
    model = worker.model_runner.get_model()
    expected, seen, unknown = _checkpoint_names(model), set[str](), list[str]()

    def known() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in expected:
                seen.add(name)
                yield name, tensor
            elif name != "lm_head.weight" or not _has_tied_head(model):  # the tied head is the embedding: writing one writes both
                unknown.append(name)

    try:
        worker.model_runner.reload_weights(weights_iterator=known())
    except BaseException:
        _abandon_reload(worker, model)
        raise
    if on_cpu:
        _refresh_packed_head(model)
    missing = sorted(expected - seen)
    problems = [f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                for kind, names in (("missing", missing), ("unknown", unknown)) if names]
    return f"{' and '.join(problems)}; expected all {len(expected)} weights by their Hugging Face names" if problems else ""


def _checkpoint_names(model: Any) -> set[str]:
    """Hugging Face names of every parameter. vLLM fuses some (q, k and v into one), so its own report of what was loaded
    does not notice a missing part."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names = set[str]()
    for name, _ in model.named_parameters():  # a tied head is not listed again
        *path, module, kind = name.split(".")
        names.update(".".join([*path, part, kind]) for part in fused.get(module, [module]))
    return names


def _has_tied_head(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def _abandon_reload(worker: Any, model: Any) -> None:
    """Put the old tensors of unfinished layers back. Otherwise vLLM would count their buffered parts towards the next push
    and, reaching the expected size too early, silently leave out the rest of it."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, worker.model_runner.model_config)


def _refresh_packed_head(model: Any) -> None:
    """On CPUs the output head multiplies with a packed copy of its weight. A reload repacks only layers that it writes
    itself, and a tied head is written through the embedding: without this it would keep the old weights, silently."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
