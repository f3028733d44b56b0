"""The gradient of one optimizer step, added up while the rest of its samples is still sampled. Collective.

    add(samples) ... add(samples)     parameters stay as they are
    finish(groups)                    the mean over the whole stage, and the step

Only where the gradient is a sum over samples that needs nothing of the others (`Objective.adds_up`): one step a stage, ratios to the weights that
the step begins with, no advantages that only the whole batch tells. What the mean divides by is known at the end, and applied there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rtpo_ray.policy.step import Totals, add_gradient
from rtpo_ray.types import Sample, UpdateResult

if TYPE_CHECKING:
    from rtpo_ray.policy.learner import Learner


class Accumulation:
    """Args:
    learner: the rank; gives micro-batches, log-probabilities, gathering and the optimizer.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._totals = Totals(learner.device)
        self._unusable: list[str] = []
        self._weights = 0.0  # of this rank's samples
        self._names: set[str] = set()  # of all ranks' samples

    @property
    def names(self) -> set[str]:
        """Ids of what was added, on any rank."""
        return self._names

    def add(self, samples: Sequence[Sample], everywhere: Sequence[str]) -> None:
        """Add the gradient of this rank's `samples`, checked; `everywhere`: the ids of all ranks'."""
        self._names.update(everywhere)
        self._weights += sum(sample.weight for sample in samples)
        for batch in self._learner.micro_batches(samples):
            self._unusable += add_gradient(self._learner, batch, self._totals, 1.0)

    def finish(self, n_groups: int) -> UpdateResult:
        """Take the step, unless something of it is not finite."""
        if not self._names:
            return self._totals.result([], 0, "")
        weights = torch.tensor(self._weights, dtype=torch.float64, device=self._learner.device)
        dist.all_reduce(weights)
        over_groups = self._learner.objective.mean_over == "groups"
        scale = 1.0 / (max(n_groups, 1) if over_groups else max(float(weights), 1e-12))
        norm, refused = self._learner.optimizer_step(self._unusable, scale)
        return self._totals.result([norm], int(not refused), refused, scale)
