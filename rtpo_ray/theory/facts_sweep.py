"""Facts about whole sweeps: what the order of turns does, and where sampled training ends."""

from __future__ import annotations

from rtpo_ray import algorithms
from rtpo_ray.theory.facts_update import ORDER, TRAP
from rtpo_ray.theory.lab import Pipeline, adam, exact_stage, make_learner, plain_steps, policy_of, process_group, train
from rtpo_ray.theory.line import Line

MARGIN = 0.15  # of expected return within SHORT sweeps; from 0.425, where the best policy has 1
SHORT, LONG, TASKS, RATE = 12, 32, 8, 0.2


def order_matters(pipeline: Pipeline, steps: int = 10) -> list[Line]:
    """One sweep, each turn trained to convergence on the trunks' boundaries. At first V_L = .5 < V_R = .6, but L can be worth 1.

    Gradient ascent on a softmax never ends; these steps leave less than 1e-4 to the worse action.
    """
    method, lines = algorithms.make("rtpo", {"n_siblings": 2}), []
    uniform = ORDER.uniform()
    for name, stages, expected in (("reverse", method.stages(2), 1.0), ("natural", [*method.stages(2)][::-1], 0.6)):
        with process_group():
            learner = make_learner(ORDER, method.objective, plain_steps(400.0))
            for stage in stages:
                exact_stage(pipeline, method, learner, ORDER, stage, ORDER.reach(uniform), steps)
            lines.append(Line(f"expected return after one sweep, {name} order", expected, ORDER.value(policy_of(learner, ORDER)), within=1e-3))
    return lines


def backward_induction(pipeline: Pipeline, seed: int = 0) -> list[Line]:
    """Sampled RTPO from a uniform start on the tree with a trap, where the first choice that pays at first (.55 against .3) is the worse one."""
    values, best = TRAP.values(TRAP.uniform()), TRAP.value(TRAP.optimum())
    return [Line("V of the trap before training", 0.55, values["right"]), Line("V of the other branch", 0.3, values["left"]),
            Line("expected return by backward induction", 1.0, best),
            Line(f"expected return after {LONG} sweeps of RTPO", best, learned(pipeline, "rtpo", LONG, seed)[-1], within=0.02)]


def every_method_learns(pipeline: Pipeline, seed: int = 0) -> list[Line]:
    """The same loop and tree, every registered method."""
    lines = []
    for name in algorithms.REGISTRY:
        returns = learned(pipeline, name, SHORT, seed)
        lines.append(Line(f"gain of expected return in {SHORT} sweeps, {name}", MARGIN, returns[-1] - returns[0], sign=">"))
    return lines


def learned(pipeline: Pipeline, name: str, sweeps: int, seed: int, **options: object) -> list[float]:
    """Expected return on the trap tree before the first sweep and after each."""
    with process_group():
        return train(pipeline, algorithms.make(name, dict(options)), TRAP, adam(RATE), sweeps=sweeps, tasks=TASKS, seed=seed)
