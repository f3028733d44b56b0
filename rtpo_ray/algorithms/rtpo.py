"""RTPO, reverse-turn policy optimisation (arXiv 2608.18682).

Turns are trained from the last to the first. At turn k every sibling starts from the same boundary S_k and is continued to
the end by the policy that the later stages have already improved, so its return-to-go is an on-policy sample of Q(S_k, l_k).
Siblings are the group and its baseline, V_k = mean_j R_j (self included); the advantage R_j - V_k is not divided by a standard
deviation. Trunks only place the boundaries: they carry no gradient and enter no baseline.

Off-policy ablation: with `sync_every` other than 1 the generators fall behind the learner within a sweep, the ratio's denominator is
then whoever sampled, and `rho_min`, `rho_max` bound the weight of the stale continuation, Q = r + clamp(prod rho, rho_min, rho_max) F.

A group whose siblings all return the same teaches nothing, which with success probability p happens to p^n + (1 - p)^n of them. With
`sibling_budget` adaptive a boundary gets `pilots` first, and the rest of its siblings only where these disagree, or by a coin; see
`algorithms.budget` for why the expected update stays the same. It raises the share of siblings with an advantage, most where most boundaries
are decided; the variance of an update at equal tokens is lowest with few siblings at many boundaries (tests/bench/allocation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtpo_ray.algorithms.base import Algorithm, Credit, Objective, Stage
from rtpo_ray.algorithms.budget import share_of
from rtpo_ray.algorithms.credit import centred, own_turn, returns
from rtpo_ray.options import opt
from rtpo_ray.types import Group


@dataclass(frozen=True, kw_only=True)
class Rtpo(Algorithm):
    n_siblings: int = opt(8, "siblings a boundary; the paper's G - 1", least=2, why="one sibling is its own baseline, so its advantage is always 0")
    sibling_budget: str = opt("fixed", "fixed: every boundary gets n_siblings; adaptive: it gets `pilots`, and the rest of n_siblings when their "
                              "returns differ, or with probability `explore`", choices=("fixed", "adaptive"))
    pilots: int = opt(4, "of sibling_budget adaptive: siblings that every boundary gets", least=2, why="one return cannot differ from itself")
    explore: float = opt(0.5, "of sibling_budget adaptive: probability of the rest when the pilots' returns agree; 1: as fixed", above=0, most=1)
    sync_every: int = opt(1, "stages between weight pushes to the generators; 0: only after the sweep", least=0)
    rho_min: float = opt(1.0, "the continuation's return is weighed by its ratio, at least this; 1 and 1: unweighed", least=0)
    rho_max: float = opt(1.0, "the same, at most this", above=0)
    reuse_trunk_at_last_turn: bool = opt(False, "at turn K-1 the weights are still the trunk's: it is one of the siblings")
    merge_groups: bool = opt(False, "boundaries of a task with the same context and state (turn 0 of several trunks) share one baseline")

    branching = True

    def check(self, max_turns: int) -> None:
        super().check(max_turns)
        if self.rho_min > self.rho_max:
            raise ValueError(f"rho_min is {self.rho_min} and rho_max is {self.rho_max}; expected rho_min <= rho_max")
        if self.sync_every == 1 and not self._unweighed:
            raise ValueError(f"rho_min is {self.rho_min} and rho_max is {self.rho_max} with sync_every 1; continuations are on-policy then: "
                             "leave both at 1, or set sync_every to 0 or more than 1")

        self._check_budget()
        if self.sync_every != 1:
            self.refuse("with sync_every other than 1 the ratio is already taken to whoever sampled", "tis_cap")

    def _check_budget(self) -> None:
        if self.sibling_budget == "fixed":
            self.refuse("with sibling_budget fixed every boundary gets n_siblings at once", "pilots", "explore")
            return
        if self.pilots >= self.n_siblings:
            raise ValueError(f"pilots is {self.pilots} and n_siblings is {self.n_siblings}; with sibling_budget adaptive expected pilots < "
                             "n_siblings, which is the size of a group that is extended")
        self.refuse("with sibling_budget adaptive a trunk is no pilot, and is in no group", "reuse_trunk_at_last_turn")
        self.refuse("with sibling_budget adaptive every boundary's own pilots decide about it", "merge_groups")
        self.refuse("with sibling_budget adaptive the returns that decided about a group are those that it is credited with", "rho_min", "rho_max")

    @property
    def _unweighed(self) -> bool:
        return self.rho_min == self.rho_max == 1.0

    @property
    def objective(self) -> Objective:
        return replace(super().objective, old_policy="learner" if self.sync_every == 1 else "engine",
                       continuation_clamp=None if self._unweighed else (self.rho_min, self.rho_max))

    def stages(self, max_turns: int) -> Sequence[Stage]:
        """K-1 down to 0."""
        pilots, explore = (self.pilots, self.explore) if self.sibling_budget == "adaptive" else (0, 1.0)
        return [Stage(turn=turn, n_siblings=self.n_siblings, pilots=pilots, explore=explore, baseline="boundary", merge=self.merge_groups,
                      with_trunk=self.reuse_trunk_at_last_turn and turn == max_turns - 1,
                      publish=self.sync_every > 0 and (max_turns - turn) % self.sync_every == 0)
                for turn in reversed(range(max_turns))]

    def credit(self, group: Group) -> Sequence[Credit]:
        """A_j = R_j - mean(R), on the group's turn. A group that stayed with its pilots has no share in the objective, nor in the KL term."""
        share = share_of(group)
        return own_turn(group, centred(returns(group)), share) if share else []
