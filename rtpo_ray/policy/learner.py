"""One rank of the learner: an FSDP2-sharded policy, its optimizer, and the update of one stage. No Ray in here.

Every public method is collective: all ranks call it, in the same order. Ranks may hold different numbers of samples, also none;
they agree on a number of micro-batches and fill up with dummies of weight 0, so the collectives inside FSDP2 match. A failure
on one rank is raised on all of them instead of leaving the others in a collective.

The loss of an optimizer step is a weighted sum over tokens (see `rtpo_ray.objectives`), so the gradient does not depend on how
samples fall in micro-batches or ranks.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from rtpo_ray.errors import ContextMismatch, NonFiniteUpdate, RtpoError
from rtpo_ray.objectives import clipped_surrogate, clipped_token_losses, k3
from rtpo_ray.policy import modeling
from rtpo_ray.policy.batching import MicroBatch, assign_steps, check_samples, check_unique, collate, dummy, plan_micro_batches
from rtpo_ray.types import Sample, UpdateResult, context_hash
from rtpo_ray.weights.channel import TensorSpec

if TYPE_CHECKING:
    from rtpo_ray.config import LearnerConfig  # read as plain attributes, so that a GPU machine needs no configuration library

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SUMS = ("tokens", "gap", "absolute_gap", "k3", "loss", "clipped_tokens", "ratio_tokens", "positions")


def init_distributed(rank: int, world_size: int, init_method: str, device: torch.device | str, timeout_seconds: float) -> None:
    """Initialise the default process group: nccl on GPUs, gloo on CPUs. Collective over the ranks."""
    device = torch.device(device)
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # a Ray actor sees only its own GPU, as number 0
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)


class Learner:
    """See the module. Construct it after `init_distributed`."""

    def __init__(
        self,
        model_path: str,
        config: LearnerConfig,
        *,
        dtype: str,
        clip_low: float,
        clip_high: float,
        epochs: int,
        minibatches: int,
        temperature: float,
        device: torch.device | str,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected more than 0")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device)
        self.optimizer_steps = 0  # since the model was loaded; decides the warm-up
        self._config, self._dtype = config, dtype
        self._clip = {"clip_low": clip_low, "clip_high": clip_high}
        self._epochs, self._minibatches, self._temperature = epochs, minibatches, temperature
        self._refusals = 0  # consecutive
        self.policy = modeling.shard(modeling.load_policy(model_path, self.device, DTYPES[dtype]), self.device)
        self._optimizer = self._build_optimizer()

    def update(self, samples: Sequence[Sample], n_groups: int, seed: int) -> UpdateResult:
        """Train on one stage: `epochs` passes of `minibatches` optimizer steps over this rank's `samples`.

        `n_groups`: groups of the whole stage over all ranks, the denominator of the mean over groups. `seed` decides how samples
        fall in mini-batches. A step with a non-finite loss, log-probability or gradient is refused on all ranks and ends the
        update. Raises ContextMismatch, ValueError (unusable sample) and, after `max_refused` refusals in a row, NonFiniteUpdate.
        """
        steps = self._plan_steps(samples, n_groups, seed)
        totals = _Totals(self.device)
        old = self._old_logprobs(samples, totals) if len(steps) > 1 else None
        scale = self._minibatches / max(n_groups, 1)
        grad_norms: list[float] = []
        refused = ""
        for step in steps:
            grad_norm, refused = self._step(step, scale, old, totals)
            grad_norms.append(grad_norm)
            if refused:
                break
        taken = len(steps) if not refused else len(grad_norms) - 1
        self._count_refusal(refused, bool(steps))
        return totals.result(grad_norms, taken, refused)

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
        for batch in self._micro_batches(samples):
            found.update(batch.split(self._logprobs(batch)))
        return [found[sample.sample_id].tolist() for sample in samples]

    def parameters_manifest(self) -> list[TensorSpec]:
        """What `full_parameters` yields, without the values. Local, not collective."""
        return [TensorSpec(name, tuple(parameter.shape), self._dtype) for name, parameter in self.policy.lm.named_parameters()]

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
        self._on_rank_zero(lambda: _replace_folder(path, lambda temporary: self._write_export(temporary, state, tokenizer_path)))

    def save_checkpoint(self, path: str) -> None:
        """Write model, optimizer and step count, sharded, replacing `path` when it exists. All ranks see the same file system."""
        temporary = _temporary(path)
        self._on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
        dcp.save(self._state(), checkpoint_id=temporary)
        self._on_rank_zero(lambda: _swap_in(temporary, path))

    def load_checkpoint(self, path: str) -> None:
        """Continue from `save_checkpoint`, which may have run with another number of ranks."""
        if not Path(path).is_dir():
            raise FileNotFoundError(f"checkpoint {path} is not a folder; expected one that save_checkpoint wrote")
        state = self._state()
        dcp.load(state, checkpoint_id=path)  # parameters and moments are filled in place
        self.optimizer_steps = int(state["optimizer_steps"].item())

    # --- the update, piece by piece

    def _plan_steps(self, samples: Sequence[Sample], n_groups: int, seed: int) -> list[list[Sample]]:
        """This rank's samples of every optimizer step; steps without a sample on any rank are left out."""
        with self._raised_together():
            check_samples(samples, self._config.micro_batch_tokens)
            if samples and n_groups < 1:
                raise ValueError(f"n_groups is {n_groups} with {len(samples)} samples; expected at least 1")
        everywhere = [name for names in self._gather([sample.sample_id for sample in samples]) for name in names]
        check_unique(everywhere)
        steps = []
        for epoch in range(self._epochs):
            step_of = assign_steps(everywhere, self._minibatches, random.Random(f"{seed}/{epoch}").getrandbits(32))
            for step in range(min(self._minibatches, len(everywhere))):
                steps.append([sample for sample in samples if step_of[sample.sample_id] == step])
        return steps

    @torch.no_grad()
    def _old_logprobs(self, samples: Sequence[Sample], totals: _Totals) -> dict[str, Tensor]:
        """log pi_theta_old of every sample [T], before the first step changes theta."""
        old: dict[str, Tensor] = {}
        for batch in self._micro_batches(samples):
            logprobs = self._logprobs(batch)
            totals.add_gap(batch, logprobs)
            old.update(batch.split(logprobs))
        return old

    def _step(self, samples: Sequence[Sample], scale: float, old: dict[str, Tensor] | None, totals: _Totals) -> tuple[float, str]:
        """One optimizer step, or none. Returns (gradient norm, why it was refused or "").

        `old`: log pi_theta_old by sample id; None: this is the only step, so theta_old is theta.
        """
        unusable: list[str] = []
        for batch in self._micro_batches(samples):
            logprobs = self._logprobs(batch)
            if old is None or not batch.sample_ids:
                old_logprobs = logprobs.detach()
            else:
                old_logprobs = torch.cat([old[name] for name in batch.sample_ids])
            loss, metrics = clipped_surrogate(logprobs, old_logprobs, batch.advantages, batch.weights, **self._clip)
            # FSDP2 averages gradients over ranks; the objective is a sum over them.
            (loss * (scale * self.world_size)).backward()
            if old is None:
                totals.add_gap(batch, logprobs.detach())
            totals.add_step(batch, loss.detach() * scale, metrics)
            unusable += self._non_finite(batch, logprobs.detach(), old_logprobs)
        names = sorted({name for names in self._gather(unusable) for name in names})
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        refused = f"samples {', '.join(names)}" if names else "" if grad_norm < float("inf") else "gradient norm"
        if not refused:
            self._optimizer.param_groups[0]["lr"] = self._learning_rate()
            self._optimizer.step()
            self.optimizer_steps += 1
        self._optimizer.zero_grad()
        return grad_norm, refused

    def _non_finite(self, batch: MicroBatch, logprobs: Tensor, old_logprobs: Tensor) -> list[str]:
        """Samples with a non-finite loss, or whose engine log-probabilities are not finite."""
        losses, _ = clipped_token_losses(logprobs, old_logprobs, batch.advantages, **self._clip)
        bad = ~torch.isfinite(losses * batch.weights + batch.engine_logprobs)
        return [batch.sample_ids[index] for index in batch.sample_index[bad].unique().tolist()] if batch.sample_ids else []

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        """This rank's micro-batches on the device, then dummies up to the largest number on any rank."""
        plan = plan_micro_batches(samples, self._config.micro_batch_tokens)
        count = torch.tensor(len(plan), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        for number in range(int(count.item())):
            yield (collate(plan[number]) if number < len(plan) else dummy()).to(self.device)

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        """float32 [M]"""
        logprobs: Tensor = self.policy(batch.input_ids, batch.rows, batch.columns, batch.targets, self._temperature)
        return logprobs

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

    def _build_optimizer(self) -> torch.optim.AdamW:
        config = self._config
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
                                      weight_decay=config.weight_decay)
        for parameter in self.policy.parameters():
            # AdamW would create these at its first step; a checkpoint needs the same entries before it.
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return optimizer

    def _state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, as tensors that share memory with the live ones (except the step count)."""
        named = dict(self.policy.lm.named_parameters())
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": {name: self._optimizer.state[parameter] for name, parameter in named.items()},
            "optimizer_steps": torch.tensor(self.optimizer_steps),
        }

    def _write_export(self, folder: str, state: dict[str, Tensor], tokenizer_path: str) -> None:
        self.policy.lm.save_pretrained(folder, state_dict=state)
        AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(folder)

    # --- agreement between ranks

    def _gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def _raised_together(self) -> Iterator[None]:
        """A block whose exception on one rank becomes an exception on every rank."""
        mine: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is: raised again below, once the other ranks know
            mine = error
        failures = self._gather(None if mine is None else (type(mine), str(mine)))
        if mine is not None:
            raise mine
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind = failure[0] if failure[0] in (ContextMismatch, ValueError) else RtpoError
                raise kind(f"learner rank {rank}: {failure[1]}")

    def _on_rank_zero(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 while the others wait; its error is raised on all ranks."""
        with self._raised_together():
            if self.rank == 0:
                action()


class _Totals:
    """Sums and maxima of one update, on the device until the end. Dummies do not count."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in _SUMS}
        self._worst = torch.zeros((), dtype=torch.float64, device=device)

    def add_gap(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Once for every sample, with log-probabilities [M] from before the first optimizer step."""
        if not batch.sample_ids:
            return
        gap = logprobs - batch.engine_logprobs
        self._add(tokens=torch.ones_like(gap), gap=gap, absolute_gap=gap.abs(), k3=k3(gap))
        self._worst = torch.maximum(self._worst, gap.abs().max().double())

    def add_step(self, batch: MicroBatch, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Once for every use of a sample. `loss`: scalar, the batch's share of the step's loss."""
        if not batch.sample_ids:
            return
        positions = torch.tensor(float(batch.input_ids.numel()), device=loss.device)
        self._add(loss=loss, clipped_tokens=metrics["clipped_tokens"], ratio_tokens=metrics["tokens"], positions=positions)

    def result(self, grad_norms: Sequence[float], taken: int, refused: str) -> UpdateResult:
        """Sum over the ranks (collective)."""
        stacked = torch.stack(list(self._sums.values()))
        dist.all_reduce(stacked)
        dist.all_reduce(self._worst, op=dist.ReduceOp.MAX)
        total = dict(zip(self._sums, stacked.tolist(), strict=True))
        tokens, steps = max(total["tokens"], 1.0), max(len(grad_norms), 1)
        return UpdateResult(
            loss=total["loss"] / steps, grad_norm=sum(grad_norms) / steps, logprob_gap_mean=total["absolute_gap"] / tokens,
            logprob_gap_max=float(self._worst), ratio_geomean=float(torch.tensor(total["gap"] / tokens, dtype=torch.float64).exp()),
            k3=total["k3"] / tokens, clip_fraction=total["clipped_tokens"] / max(total["ratio_tokens"], 1.0), tokens=int(total["tokens"]),
            learner_tokens=int(total["positions"]), optimizer_steps=taken, refused=refused)

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] += value.double().sum()


def _temporary(path: str) -> str:
    return f"{path.rstrip('/')}.writing"


def _replace_folder(path: str, write: Callable[[str], None]) -> None:
    """`write` a folder beside `path` and move it there, so that `path` is whole or absent at any time."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    _swap_in(temporary, path)


def _swap_in(temporary: str, path: str) -> None:
    old = f"{path.rstrip('/')}.old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(path):
        os.rename(path, old)
    os.rename(temporary, path)
    shutil.rmtree(old, ignore_errors=True)
