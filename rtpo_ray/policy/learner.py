"""One rank of the learner: an FSDP2-sharded policy, its optimizer, scores, exports and checkpoints. No Ray in here.

Every public method is collective: all ranks call it, in the same order. Ranks may hold different numbers of samples, also none;
they agree on a number of micro-batches and fill up with dummies of weight 0, so the collectives inside FSDP2 match. A failure
on one rank is raised on all of them instead of leaving the others in a collective.

The loss of an optimizer step is a weighted sum over tokens (see `rtpo_ray.objectives`), so the gradient does not depend on how
samples fall in micro-batches or ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from rtpo_ray.algorithms.base import Objective
from rtpo_ray.errors import CheckpointError, ContextMismatch, NonFiniteUpdate, RtpoError
from rtpo_ray.policy import lora, modeling
from rtpo_ray.policy.accumulation import Accumulation
from rtpo_ray.policy.batching import MicroBatch, check_samples, check_unique, computed_tokens, dummy, plan
from rtpo_ray.policy.checkpoints import checkpoint_errors, replace_folder, swap_in, unfinished, whole
from rtpo_ray.policy.update import Update
from rtpo_ray.types import Sample, UpdateResult, context_hash
from rtpo_ray.weights.hashing import TensorSpec

if TYPE_CHECKING:
    from rtpo_ray.config import LearnerConfig  # read as plain attributes, so that a GPU machine needs no configuration library

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def init_distributed(rank: int, world_size: int, meet: str | dist.Store, device: torch.device | str, timeout_seconds: float) -> None:
    """Initialise the default process group: nccl on GPUs, gloo on CPUs. Collective over the ranks, which meet over a store or an
    init method such as a file://."""
    device = torch.device(device)
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # a Ray actor sees only its own GPU, as number 0
    backend = "nccl" if device.type == "cuda" else "gloo"
    how: dict[str, Any] = {"init_method": meet} if isinstance(meet, str) else {"store": meet}
    dist.init_process_group(backend, **how, rank=rank, world_size=world_size, timeout=timeout)


class Learner:
    """See the module. Construct it after `init_distributed`. `policy`: what to train instead of the model in `model_path`; `seed`: of
    adapters. Raises ConfigError when there is no linear layer for them."""

    def __init__(
        self,
        model_path: str,
        config: LearnerConfig,
        *,
        objective: Objective,
        dtype: str,
        temperature: float,
        device: torch.device | str,
        policy: modeling.Policy | None = None,
        seed: int = 0,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected more than 0")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device)
        self.optimizer_steps = 0  # since the model was loaded; decides the warm-up
        self._config, self._dtype = config, dtype
        self.objective, self._temperature = objective, temperature
        self._refusals = 0  # consecutive
        self._open_step: Accumulation | None = None  # whose samples are still coming
        self._adapters = policy is None and config.lora_rank > 0
        if policy is None:
            policy = self._load(model_path, value_head=objective.critic is not None, adapters=config if self._adapters else None, seed=seed)
        self.policy = modeling.shard(policy, self.device, config.recompute, config.compile)
        self._reference: modeling.Policy | None = None  # with adapters it is what they lie beside
        if objective.kl_coef and not self._adapters:
            self._reference = modeling.shard(self._load(model_path).requires_grad_(False), self.device)
        self._optimizer = self._build_optimizer()
        # Checkpoints are written in the background, so their collectives need a group of their own, of a backend that knows CPUs.
        self._writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=getattr(config, "timeout", 600.0)))
        self._stager = DefaultStager(StagingOptions(use_pinned_memory=self.device.type == "cuda", use_shared_memory=False,
                                                    use_async_staging=False, use_non_blocking_copy=False))
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def _load(self, model_path: str, **options: Any) -> modeling.Policy:
        return modeling.load_policy(model_path, self.device, DTYPES[self._dtype], **options)

    def update(self, samples: Sequence[Sample], n_groups: int, n_rollouts: int, seed: int) -> UpdateResult:
        """Train on one stage: this rank's `samples`, as the objective says.

        `n_groups`, `n_rollouts`: of the whole stage over all ranks, those without any advantage included; the denominators of means.
        `seed` decides how samples fall in mini-batches. A step with a non-finite loss, log-probability or gradient is refused on all
        ranks and ends the update. Raises ContextMismatch, ValueError (unusable sample) and, after `max_refused` refusals in a row,
        NonFiniteUpdate.
        """
        open_step, self._open_step = self._open_step, None
        with self._no_rest():
            everywhere = self._check(samples, open_step.names if open_step else set())
            names = [*(open_step.names if open_step else ()), *everywhere]
            if names and n_groups < 1:
                raise ValueError(f"n_groups is {n_groups} with samples {', '.join(names[:3])}; expected at least 1")
            if self.objective.adds_up:
                open_step = open_step or Accumulation(self)
                open_step.add(samples, everywhere)
                result = open_step.finish(n_groups)
            else:
                result = Update(self, samples, n_groups, n_rollouts, seed).run()
        self._count_refusal(result.refused, bool(names))
        return result

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Add the gradient of some of the next update's samples; that update is then given the rest. Parameters do not change. Only for
        objectives that add up. Raises as `update`, which drops what was accumulated."""
        if not self.objective.adds_up:
            raise ValueError("accumulate was called for an objective whose gradient does not add up; give all samples to update")
        open_step = self._open_step or Accumulation(self)
        self._open_step = None
        with self._no_rest():
            open_step.add(samples, self._check(samples, open_step.names))
        self._open_step = open_step

    @contextmanager
    def _no_rest(self) -> Iterator[None]:
        """A block whose exception leaves nothing of a gradient."""
        try:
            yield
        except Exception:
            self._optimizer.zero_grad()
            raise

    def fills_a_micro_batch(self, samples: Sequence[Sample]) -> bool:
        """Whether some rank's samples are enough for one: fewer would be computed at a worse pace."""
        found = computed_tokens(samples, packed=self.policy.packs, share=self._config.share_prefixes)
        tokens = torch.tensor(found, device=self.device)
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
        return bool(tokens >= self._config.micro_batch_tokens)

    def _check(self, samples: Sequence[Sample], before: set[str]) -> list[str]:
        """Ids of the samples of all ranks, which are usable and none of them in `before`."""
        with self.raised_together():
            check_samples(samples, self._config.micro_batch_tokens)
        everywhere = [name for names in self.gather([sample.sample_id for sample in samples]) for name in names]
        check_unique([*everywhere, *before.intersection(everywhere)])  # not all of `before`, which is counted once a round
        return everywhere

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probabilities of every response token at the training temperature, [sequence][T].

        `sequences` are (context ids, response ids), the same ones on every rank; each rank computes all of them.
        """
        samples = [
            Sample(sample_id=str(number), context_ids=context, context_hash=context_hash(context), response_ids=response,
                   engine_logprobs=[0.0] * len(response), advantage=0.0, weight=0.0)
            for number, (context, response) in enumerate(sequences)
        ]
        check_samples(samples, self._config.micro_batch_tokens)
        found: dict[str, Tensor] = {}
        for batch in self.micro_batches(samples):
            found.update(batch.split(self.forward(batch)[0]))
        return [found[sample.sample_id].tolist() for sample in samples]

    def parameters_manifest(self) -> list[TensorSpec]:
        """What `full_parameters` yields, without the values. Local, not collective."""
        return [TensorSpec(name, tuple(parameter.shape), self._dtype) for name, parameter, _ in lora.base_parameters(self.policy.lm)]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every full parameter in the engine's dtype, for the weight channel. Every rank iterates to the end; read the tensors only."""
        for name, value in modeling.full_parameters(self.policy):
            yield name, value.to(DTYPES[self._dtype])

    def export(self, path: str, tokenizer_path: str) -> None:
        """Write a Hugging Face folder (float32 weights and the tokenizer of `tokenizer_path`), replacing `path` when it exists."""
        state: dict[str, Tensor] = {}
        for name, value in modeling.full_parameters(self.policy):
            if self.rank == 0:
                state[name] = value.cpu()
        self._on_rank_zero(lambda: replace_folder(path, lambda temporary: self._write_export(temporary, state, tokenizer_path)))

    def save_checkpoint(self, path: str) -> None:
        """Write what is trained (with adapters: these alone), optimizer and step count, sharded, replacing `path` when it exists. All ranks
        see the same file system.

        Raises CheckpointError when it cannot be written; `path` is then as before.
        """
        self.start_checkpoint(path)
        self.finish_checkpoint()

    def start_checkpoint(self, path: str) -> None:
        """The same in the background, from a copy that is made at once. `path` appears when all of it is written.

        Raises CheckpointError of the one before.
        """
        self.finish_checkpoint()
        temporary = unfinished(path)
        self._on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
        with checkpoint_errors(f"{path} could not be written"):
            writer = dcp.HuggingFaceStorageWriter(temporary, save_distributed=True)  # safetensors: to read it runs no code
            written = dcp.async_save(self._state(), storage_writer=writer, process_group=self._writers, async_stager=self._stager)
        self._writing = self._writer.submit(self._put_in_place, written, temporary, path)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises CheckpointError when it could not be."""
        writing, self._writing = self._writing, None
        with self.raised_together():
            if writing is not None:
                writing.result(timeout=getattr(self._config, "timeout", 600.0))

    def _put_in_place(self, written: Any, temporary: str, path: str) -> None:
        """In the background: once every rank has written its shard, rank 0 moves the folder to where it is looked for."""
        try:
            with checkpoint_errors(f"{path} could not be written"):
                written.result()
                if self.rank == 0:
                    swap_in(temporary, path)
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
            raise

    def load_checkpoint(self, path: str) -> None:
        """Continue from `save_checkpoint`, which may have run with another number of ranks."""
        self.finish_checkpoint()
        self._open_step = None
        self._optimizer.zero_grad()
        state = self._state()
        with self.raised_together():
            if not Path(path).is_dir():
                raise CheckpointError(f"checkpoint {path} is not a folder; expected one that save_checkpoint wrote")
            with checkpoint_errors(f"{path} could not be read"):
                reader = whole(path)
        with checkpoint_errors(f"{path} could not be read"):
            dcp.load(state, storage_reader=reader)  # parameters and moments are filled in place
        self.optimizer_steps = int(state["optimizer_steps"].item())

    # --- what an update is made of

    def micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        """This rank's micro-batches on the device, then dummies up to the largest number on any rank."""
        mine = plan(samples, self._config.micro_batch_tokens, packed=self.policy.packs, share=self._config.share_prefixes)
        count = torch.tensor(len(mine), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        for number in range(int(count.item())):
            yield (mine[number]() if number < len(mine) else dummy()).to(self.device)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """float32 [M] each: log-probabilities, and values when the policy has a value head."""
        return self._forward(self.policy, batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        """float32 [M] under the model that training began with; None when the objective needs none."""
        if not self.objective.kl_coef:
            return None
        if self._reference is None:
            with lora.without_adapters(self.policy.lm):
                return self.forward(batch)[0]
        return self._forward(self._reference, batch)[0]

    def _forward(self, policy: modeling.Policy, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        logprobs, values = policy(batch.input_ids, batch.rows, batch.columns, batch.labels, self._temperature, layout=batch.layout)
        return logprobs[batch.scored], None if values is None else values[batch.scored]

    def optimizer_step(self, unusable: Sequence[str], scale: float = 1.0) -> tuple[float, str]:
        """Multiply the gradient by `scale`, clip it and step, unless a sample is `unusable` on any rank or the gradient is not finite: (norm before
        clipping, why there was no step)."""
        names = sorted({name for names in self.gather(list(unusable)) for name in names})
        refused = f"samples {', '.join(names)}" if names else ""
        if scale != 1.0:
            for parameter in self._trained().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        refused = refused or ("" if grad_norm < float("inf") else "gradient norm")
        if not refused:
            self._optimizer.param_groups[0]["lr"] = self._learning_rate()
            self._optimizer.step()
            self.optimizer_steps += 1
        self._optimizer.zero_grad()
        return grad_norm, refused

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def raised_together(self) -> Iterator[None]:
        """A block whose exception on one rank becomes an exception on every rank."""
        mine: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is: raised again below, once the other ranks know
            mine = error
        failures = self.gather(None if mine is None else (type(mine), str(mine)))
        if mine is not None:
            raise mine
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind = failure[0] if failure[0] in (ContextMismatch, ValueError, CheckpointError) else RtpoError
                raise kind(f"learner rank {rank}: {failure[1]}")

    def _count_refusal(self, refused: str, any_step: bool) -> None:
        if any_step:
            self._refusals = self._refusals + 1 if refused else 0
        if self._refusals >= self._config.max_refused:
            raise NonFiniteUpdate(f"{self._refusals} updates in a row were not finite (learner.max_refused is {self._config.max_refused}); "
                                  f"the last one because of {refused}")

    def _learning_rate(self) -> float:
        """Of the next step: rises linearly over `warmup_steps`, then stays."""
        return self._config.lr * min(1.0, (self.optimizer_steps + 1) / max(self._config.warmup_steps, 1))

    # --- state

    def _trained(self) -> dict[str, Tensor]:
        """What is trained, by name: all parameters, or adapters and value head."""
        return {name: parameter for name, parameter in self.policy.named_parameters() if parameter.requires_grad}

    def _build_optimizer(self) -> torch.optim.AdamW:
        config, trained = self._config, list(self._trained().values())
        optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
                                      weight_decay=config.weight_decay, fused=True)
        for parameter in trained:
            # AdamW would create these at its first step; a checkpoint needs the same entries before it.
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        return optimizer

    def _state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, as tensors that share memory with the live ones (except the step count)."""
        named = self._trained()
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": {name: self._optimizer.state[parameter] for name, parameter in named.items()},
            "optimizer_steps": torch.tensor(self.optimizer_steps),
        }

    def _write_export(self, folder: str, state: dict[str, Tensor], tokenizer_path: str) -> None:
        self.policy.lm.save_pretrained(folder, state_dict=state)
        AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(folder)

    def _on_rank_zero(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 while the others wait; its error is raised on all ranks."""
        with self.raised_together():
            if self.rank == 0:
                action()
