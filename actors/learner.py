"""One rank of the learner gang: the plain `Learner` behind an actor, plus the sending end of the weight channel.

torch is imported where it is used: whoever merely holds a handle of this actor imports this module too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from actors.waiting import on_node
from pipelines.counts import StageCounts, count_stage
from pipelines.credit import samples_to_train
from pipelines.rows import unpack
from rtpo_ray.algorithms.base import Objective
from rtpo_ray.config import LearnerConfig, WeightsConfig
from rtpo_ray.timeline import Span, Timeline
from rtpo_ray.types import PushTimes, Sample, UpdateResult

if TYPE_CHECKING:
    import torch.distributed as dist

    from rtpo_ray.policy.learner import Learner
    from rtpo_ray.weights.channel import WeightChannel


class LearnerRank:
    """Args:
    rank: this rank, 0-based; rank 0 sends weights and writes exports.
    device: "cpu" or "cuda".
    seed: of LoRA adapters.
    """

    def __init__(self, *, rank: int, world_size: int, model_path: str, dtype: str, config: LearnerConfig, weights: WeightsConfig,
                 objective: Objective, temperature: float, device: str, seed: int) -> None:
        self._rank, self._world_size, self._model_path, self._dtype = rank, world_size, model_path, dtype
        self._config, self._weights, self._objective, self._temperature, self._device = config, weights, objective, temperature, device
        self._seed = seed
        self._learner: Learner | None = None
        self._store: dist.TCPStore | None = None
        self._channel: WeightChannel | None = None
        self._samples: list[Sample] = []
        self._timeline = Timeline(f"rtpo-learner-{rank}")

    def __repr__(self) -> str:
        return f"LearnerRank({self._rank} of {self._world_size}{on_node()})"

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0: where the ranks meet, and receivers of weights later: address and port of a store."""
        from rtpo_ray.network import open_store

        host = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = open_store(host, max(self._config.timeout, self._weights.timeout))
        return host, self._store.port

    def setup(self, host: str, port: int) -> int:
        """Join the gang at rank 0's rendezvous and load this rank's shard of the model; returns the rank."""
        from rtpo_ray.network import join_store, use_interface_of
        from rtpo_ray.policy.learner import Learner, init_distributed

        use_interface_of(ray.util.get_node_ip_address())
        init_distributed(self._rank, self._world_size, join_store(host, port, self._config.timeout), self._device, self._config.timeout)
        self._learner = Learner(
            self._model_path, self._config, objective=self._objective, dtype=self._dtype, temperature=self._temperature, device=self._device,
            seed=self._seed)
        return self._rank

    def receive(self, block: pa.Table) -> StageCounts:
        """Keep one block of a stage until `accumulate` or `update`; returns what is in it."""
        samples = unpack(block)
        self._samples += samples_to_train(samples)
        return count_stage(samples)

    def accumulate(self) -> float:
        """Add up the gradient of what was received, once that fills a micro-batch: the seconds that it took. Collective."""
        if not self.learner.fills_a_micro_batch(self._samples):
            return 0.0
        started = time.perf_counter()
        samples, self._samples = self._samples, []
        with self._timeline.span("gradient", "learner", samples=len(samples)):
            self.learner.accumulate(samples)
        return time.perf_counter() - started

    def update(self, n_groups: int, n_rollouts: int, seed: int) -> UpdateResult:
        """Train on every block received since the last update. Collective."""
        samples, self._samples = self._samples, []
        with self._timeline.span("update", "learner", samples=len(samples)):
            return self.learner.update(samples, n_groups, n_rollouts, seed)

    def take_spans(self) -> list[Span]:
        """Of this process's timeline, since the last call."""
        return self._timeline.take()

    def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probabilities [T] of each response at the sampling temperature. Collective."""
        return self.learner.score(sequences)

    def join_channel(self, name: str, world_size: int) -> None:
        """Rank 0: become the sender of a new channel; returns when every receiver is there."""
        from rtpo_ray.weights.channel import WeightChannel

        if self._channel is not None:
            self._channel.close()
        host, port = self.rendezvous()
        self._channel = WeightChannel(name, 0, world_size, host, port, self._device, self._weights.timeout, self._weights.bucket_mb << 20,
                                      self._timeline)

    def send_weights(self, version: int) -> tuple[str, PushTimes | None]:
        """Broadcast the whole model from rank 0: (hash of what was sent, what it took). Collective over the gang: every rank helps to gather."""
        with self._timeline.span("weights", "learner", version=version):
            return self._send(version)

    def _send(self, version: int) -> tuple[str, PushTimes | None]:
        if self._rank:
            for _ in self.learner.full_parameters():
                pass
            return "", None
        assert self._channel is not None, "rank 0 was asked to send weights before it joined a channel"
        digest = self._channel.send(version, self.learner.parameters_manifest(), self.learner.full_parameters())
        return digest, self._channel.times

    def export(self, path: str) -> str:
        """Write the model as a Hugging Face folder. Collective."""
        self.learner.export(path, self._model_path)
        return path

    def start_checkpoint(self, path: str) -> None:
        """Write a sharded checkpoint of model and optimizer, in the background. Collective."""
        self.learner.start_checkpoint(path)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any. Collective. Raises CheckpointError when it could not be."""
        self.learner.finish_checkpoint()

    def load_checkpoint(self, path: str) -> None:
        """Continue from a checkpoint; forgets samples received since the last update. Collective."""
        self._samples = []
        self.learner.load_checkpoint(path)

    @property
    def learner(self) -> Learner:
        assert self._learner is not None, f"learner rank {self._rank} was used before setup"
        return self._learner
