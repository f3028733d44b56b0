"""The learner gang: FSDP2 ranks in one placement group, driven as one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.learner import LearnerRank
from actors.waiting import wait_for, wait_for_end
from pipelines.counts import StageCounts
from rtpo_ray.algorithms.base import Objective
from rtpo_ray.config import Config
from rtpo_ray.errors import DeadlineExceeded, LearnerLost
from rtpo_ray.types import UpdateResult

LEARNERS = "rtpo-learners"  # name of the placement group
AHEAD = 2  # rounds of gradients that ranks may have before them


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of a stage's blocks; times in seconds."""

    counts: StageCounts
    waited: float  # for the ranks, after the last block had come
    overlapped: float  # that gradients took before


class LearnerGang:
    """Args:
    config: the whole configuration; the gang needs its learner, model and weights sections.
    model_path: Hugging Face folder or name.
    objective: what the ranks maximise.
    """

    def __init__(self, config: Config, model_path: str, objective: Objective) -> None:
        self._config, self._model_path, self._objective = config, model_path, objective
        self._timeout = config.learner.timeout
        self._order = threading.Lock()
        self.generation = 0  # how often the gang was started; weight channels do not outlive it
        self._place()
        self._start()

    def restart(self) -> None:
        """End all ranks and start them again, with the model as it was at first. For when one of them is lost."""
        for rank in self.ranks:
            ray.kill(rank)
        wait_for_end(["rtpo-learner-*"], self._config.cluster.start_timeout)
        self._start()  # in the same places, which nobody else may take meanwhile

    def _place(self) -> None:
        learner, start = self._config.learner, self._config.cluster.start_timeout
        bundle = {"CPU": learner.cpus, "GPU": learner.gpus, **custom_resource(learner.resource)}
        self._group = placement_group([{k: v for k, v in bundle.items() if v}] * learner.ranks, strategy="PACK", name=LEARNERS)
        if not self._group.wait(start):
            raise DeadlineExceeded(f"placement of {learner.ranks} learner ranks ({bundle} each) not granted within cluster.start_timeout "
                               f"({start:g} s); the cluster has {ray.available_resources()}")

    def _start(self) -> None:
        learner, start = self._config.learner, self._config.cluster.start_timeout
        if not self._group.wait(start):  # a node may be gone
            raise DeadlineExceeded(f"the placement of the learner ranks was not granted again within cluster.start_timeout ({start:g} s)")
        self.ranks = [self._spawn(rank) for rank in range(learner.ranks)]
        where = wait_for(self.ranks[0].rendezvous.remote(), start, "learner rank 0 to start")
        wait_for([rank.setup.remote(*where) for rank in self.ranks], start, "the learner ranks to load the model")
        self.generation += 1

    def _spawn(self, rank: int) -> Any:
        config, learner = self._config, self._config.learner
        return ray.remote(LearnerRank).options(
            name=f"rtpo-learner-{rank}", num_cpus=learner.cpus, num_gpus=learner.gpus, max_restarts=0,
            resources=custom_resource(learner.resource),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            runtime_env={"env_vars": thread_variables(learner.threads)},
        ).remote(rank=rank, world_size=learner.ranks, model_path=self._model_path, dtype=config.model.dtype, config=learner, weights=config.weights,
                 objective=self._objective, temperature=config.sampling.temperature, device="cuda" if learner.gpus else "cpu",
                 seed=config.run.seed)

    def take(self, blocks: Iterable[ray.ObjectRef], stream: bool) -> Taken:
        """Hand a stage's blocks to the ranks in turn, as they come. `stream`: once every rank has another one, gradients are added up, if the
        objective allows it; the next block waits while more than `AHEAD` of these rounds are under way, so that nothing else queues behind many."""
        stream = stream and self._objective.adds_up
        counted, rounds, seconds = list[ray.ObjectRef](), deque[list[ray.ObjectRef]](), 0.0
        for number, block in enumerate(blocks):
            turn = number % len(self.ranks)
            counted.append(self.ranks[turn].receive.remote(block))
            if stream and turn == len(self.ranks) - 1:
                rounds.append(self.call("accumulate"))
                if len(rounds) > AHEAD:
                    seconds += max(self._answers(rounds.popleft(), "add up a stage's gradient"))
        came = time.perf_counter()
        counts = sum(self._answers(counted, "take a stage's samples"), StageCounts())
        seconds += sum(max(self._answers(each, "add up a stage's gradient")) for each in rounds)
        waited = time.perf_counter() - came
        return Taken(counts=counts, waited=waited, overlapped=max(0.0, seconds - waited))

    def update(self, n_groups: int, n_rollouts: int, seed: int) -> UpdateResult:
        """One update on all that was fed; the ranks agree on the result."""
        return self._all("update", n_groups, n_rollouts, seed)[0]

    def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        return self._all("score", sequences)[0]

    def export(self, path: str) -> None:
        self._all("export", path)

    def start_checkpoint(self, path: str) -> None:
        """Write a checkpoint in the background, after the one before. Raises CheckpointError of that one."""
        self._all("start_checkpoint", path)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises CheckpointError when it could not be."""
        self._all("finish_checkpoint")

    def load_checkpoint(self, path: str) -> None:
        self._all("load_checkpoint", path)

    def call(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Of every rank, without waiting. Two threads call (one hands over samples, one brings a late generator to the weights), and every rank must
        get their collectives in the same order, or the ranks wait for each other."""
        with self._order:
            return [getattr(rank, method).remote(*args) for rank in self.ranks]

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._answers(self.call(method, *args), method)

    def _answers(self, refs: list[ray.ObjectRef], what: str) -> list[Any]:
        """Raises LearnerLost when a rank died or does not answer, and what a rank raised."""
        try:
            answers: list[Any] = wait_for(refs, self._timeout, f"the learner ranks to {what} (learner.timeout)")
        except (RayError, DeadlineExceeded) as error:
            if isinstance(error, (RayActorError, DeadlineExceeded)) or someone_died(refs):
                raise LearnerLost(f"a learner rank was lost when the gang was to {what}: {str(error).strip().partition(chr(10))[0]}") from error
            raise
        return answers

    def close(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
        remove_placement_group(self._group)


def someone_died(refs: Sequence[ray.ObjectRef], patience: float = 10.0) -> bool:
    """Whether one of these answers says that its actor is dead. When a rank dies in a collective, the others raise first, and something else."""
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=patience)
    for ref in ready:
        try:
            ray.get(ref, timeout=patience)
        except RayActorError:
            return True
        except RayError:
            continue
    return False


def custom_resource(name: str) -> dict[str, float]:
    """One unit of it, when one is named."""
    return {name: 1.0} if name else {}


def thread_variables(threads: int) -> dict[str, str]:
    """Environment of a process that computes on CPUs: spinning OpenMP threads on shared cores collapse to a crawl."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false",
            "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all"}
