"""An algorithm is data about the loop: which stages a sweep has, where siblings branch off, what credit a response gets, which
objective is maximised. Nothing in here knows Ray, tensors or models.

    trunks ──► for each stage:  branches(trunks) ─► siblings ─► groups ─► credit ─► objective ─► weights published
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rtpo_ray.options import opt
from rtpo_ray.types import Group, Rollout, TurnRecord


def _one_of(owner: object, name: str, *choices: str) -> None:
    """A misspelt choice must not pass for another one."""
    if getattr(owner, name) not in choices:
        raise ValueError(f"{type(owner).__name__}.{name} is {getattr(owner, name)!r}; valid choices: {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One round of collecting, updating and publishing.

    turn: siblings branch off at this turn's boundaries, and the stage is skipped when there are none; None: wherever `branches` says.
    n_siblings: of each of these boundaries, the trunk included when it is one of them; with `pilots`, of those that are extended.
    pilots: siblings that every boundary gets before the rest of `n_siblings` is given to some; 0: all get all at once. Credit must then weigh a
        group by `algorithms.budget.share_of`, as `own_turn` does when it is told.
    explore: probability that a boundary gets the rest when its pilots' returns agree.
    baseline: "task": all rollouts of a task are one group and every turn is trained; "boundary": the siblings of one boundary are, and
        only the turn that follows it is trained.
    with_trunk: the trunk is one of its own siblings (of a task, or from the boundary on).
    merge: boundaries of a task with the same context and environment state share one group.
    publish: send the new weights to the generators before the next stage.
    """

    turn: int | None = None
    n_siblings: int = 0
    pilots: int = 0
    explore: float = 1.0
    baseline: str = "task"
    with_trunk: bool = True
    merge: bool = False
    publish: bool = True

    def __post_init__(self) -> None:
        _one_of(self, "baseline", "task", "boundary")
        if self.pilots and (not 2 <= self.pilots < self.n_siblings or not 0 < self.explore <= 1 or self.with_trunk or self.merge):
            raise ValueError(f"pilots is {self.pilots} with n_siblings {self.n_siblings}, explore {self.explore}, with_trunk {self.with_trunk} and "
                             f"merge {self.merge}; expected 2 <= pilots < n_siblings, 0 < explore <= 1, and neither of the others")

    @property
    def siblings_a_boundary(self) -> tuple[int, int]:
        """(least, most) that a boundary of the stage's turn may have, the trunk included when it is one of them."""
        return self.pilots or self.n_siblings, self.n_siblings


@dataclass(frozen=True, slots=True)
class Branch:
    """`count` siblings from the boundary of `turn` of the task's trunk number `trunk`."""

    trunk: int
    turn: int
    count: int
    more: int = 0  # siblings that may follow: `count` are then pilots, see algorithms.budget
    explore: float = 0.0  # probability that they do when the pilots' returns agree


@dataclass(frozen=True, slots=True)
class Credit:
    """What one record of one sibling is worth. `weight` is its share of the group's objective, spread over its tokens."""

    sibling: int  # index into group.siblings
    record: TurnRecord
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """A value head and generalised advantage estimation (PPO)."""

    level: str = "token"  # token | turn
    gamma: float = 1.0
    lam: float = 1.0
    coef: float = 0.5  # of the value loss
    clip: float = 0.2  # a new value may differ from the old one by so much; 0: no clip
    whiten: bool = True

    def __post_init__(self) -> None:
        _one_of(self, "level", "token", "turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOrder:
    """Turns are updated one after the other on the same rollouts; what an update did is carried to the next turn's advantage (SeeUPO)."""

    order: str = "reverse"  # reverse | natural | random
    carry: str = "product"  # product | geometric: of the response's token ratios
    carry_clip: float = 0.0  # the carried ratio is clipped to 1 +/- this; 0: no clip
    advantage_clip: float = 0.0  # |advantage| is clipped to this; 0: no clip

    def __post_init__(self) -> None:
        _one_of(self, "order", "reverse", "natural", "random")
        _one_of(self, "carry", "product", "geometric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What the learner maximises on a stage's samples, and in how many steps.

    loss: "clipped": min(rho A, clip(rho) A); "regression": pairs of siblings, squared error of the log-ratio difference / eta against the
        difference of returns (REFUEL).
    ratio: "token", or "sequence": the geometric mean over the response, as one ratio for all its tokens (GSPO).
    mean_over: what the sum of weighted losses is divided by: "groups", or "weights": the sum of the samples' weights.
    old_policy: the denominator of the ratio: "learner" before the stage's first step, or "engine": whoever sampled, for stale samples.
    continuation_clamp: when siblings were continued by older weights, returns after the trained turn are multiplied by the product of
        token ratios of the continuation, clamped to (low, high); None: returns as they are.
    normalise: divide advantages by their standard deviation over the whole batch.
    """

    loss: str = "clipped"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # A < 0: at least dual_clip * A; 0: off
    kl_coef: float = 0.0  # of the k3 estimate of KL(policy || reference); 0: no reference model is loaded
    tis_cap: float = 0.0  # truncated importance sampling: weight min(learner / engine, cap) a token; 0: off
    epochs: int = 1
    minibatches: int = 1
    mean_over: str = "groups"
    old_policy: str = "learner"
    continuation_clamp: tuple[float, float] | None = None
    normalise: bool = False
    eta: float = 1.0
    critic: Critic | None = None
    turns: TurnOrder | None = None

    def __post_init__(self) -> None:
        for name, choices in (("loss", ("clipped", "regression")), ("ratio", ("token", "sequence")), ("mean_over", ("groups", "weights")),
                              ("old_policy", ("learner", "engine"))):
            _one_of(self, name, *choices)

    @property
    def adds_up(self) -> bool:
        """Whether a stage's gradient is a sum over its samples that needs nothing of the others, so that it may be added up as they come."""
        one_step = self.turns is None and self.epochs == self.minibatches == 1
        return one_step and self.loss == "clipped" and self.critic is None and self.continuation_clamp is None and not self.normalise

    @property
    def needs_all(self) -> bool:
        """Whether samples without advantage still send a gradient, so that they must reach the learner."""
        pulled_together = self.loss == "regression" and self.epochs * self.minibatches > 1  # a pair of equal returns, once its ratios differ
        return self.kl_coef > 0 or self.critic is not None or self.continuation_clamp is not None or pulled_together


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all methods. Subclass it as a frozen dataclass: its fields are what `algorithm.args` may set.

    A method that only credits whole rollouts (GRPO) defines `credit`; one that branches also `stages` (RTPO) or `branches` (TreeGRPO).
    """

    n_trunks: int = opt(1, "whole episodes a task", least=1)
    clip_low: float = opt(0.2, "ratio is clipped below 1 - clip_low", above=0)
    clip_high: float = opt(0.2, "ratio is clipped above 1 + clip_high", above=0)
    dual_clip: float = opt(0.0, "with A < 0, the objective is at least dual_clip * A; 0: off", least=0)
    kl_coef: float = opt(0.0, "weight of the KL estimate to the initial model, which is loaded only when this is above 0", least=0)
    tis_cap: float = opt(0.0, "truncated importance sampling: tokens weigh min(learner / engine probability, tis_cap); 0: off", least=0)
    epochs: int = opt(1, "passes over a stage's samples", least=1)
    minibatches: int = opt(1, "optimizer steps a pass", least=1)

    branching = False  # whether trunks must keep their boundaries

    def check(self, max_turns: int) -> None:
        """Raise ValueError when the options cannot work together, naming them."""
        if self.clip_low >= 1:
            raise ValueError(f"clip_low is {self.clip_low}; expected less than 1, since a ratio is never below 0")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; expected 0 (off) or more than 1: at 1 and below it would hold every token whose "
                             "advantage is negative")
        if 0 < self.tis_cap < 1:
            raise ValueError(f"tis_cap is {self.tis_cap}; expected 0 (off) or at least 1, the weight of a token that both sample alike")

    def refuse(self, reason: str, *names: str) -> None:
        """For `check`: raise ValueError when one of these options has another value than its default."""
        for spec in dataclasses.fields(self):
            if spec.name in names and getattr(self, spec.name) != spec.default:
                raise ValueError(f"{spec.name} is {getattr(self, spec.name)}; {reason}: leave it at {spec.default}")

    @property
    def objective(self) -> Objective:
        return Objective(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip, kl_coef=self.kl_coef,
                         tis_cap=self.tis_cap, epochs=self.epochs, minibatches=self.minibatches)

    def stages(self, max_turns: int) -> Sequence[Stage]:
        """The stages of one sweep, in the order in which they run. By default one, on the trunks as they are."""
        return (Stage(),)

    def branches(self, stage: Stage, trunks: Sequence[Rollout], rng: random.Random) -> Sequence[Branch]:
        """Where siblings of one task's trunks start. Only trunks that did not fail are given. By default at the stage's turn."""
        least, most = stage.siblings_a_boundary
        explore = stage.explore if most > least else 0.0
        return [Branch(index, stage.turn, least - stage.with_trunk, most - least, explore) for index, trunk in enumerate(trunks)
                if stage.turn is not None and any(boundary.turn == stage.turn for boundary in trunk.boundaries)]

    def credit(self, group: Group) -> Sequence[Credit]:
        """Credit of every response of the group that is trained. No sibling of it failed."""
        raise TypeError(f"{type(self).__name__} must define credit(group)")
