"""All facts as a table, by the numbers of the list in the project's notes on algorithms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rtpo_ray.theory import facts_credit, facts_sweep, facts_update
from rtpo_ray.theory.lab import Pipeline
from rtpo_ray.theory.line import Line

FACTS: Mapping[str, Callable[[Pipeline], list[Line]]] = {
    "order matters": facts_sweep.order_matters,
    "SeeUPO carries advantages": facts_update.carried_advantage,
    "trajectory credit can have the wrong sign": facts_credit.wrong_sign,
    "and can have the smaller error": facts_credit.not_universal,
    "error of n siblings in closed form": facts_credit.closed_form_of_the_error,
    "clipping": facts_update.clipping,
    "drift of a stale weight": facts_update.drift,
    "flat baselines": facts_credit.baselines,
    "TreeGRPO": facts_credit.tree_baseline,
    "GSPO": facts_update.sequence_ratio,
    "generalised advantage estimation": facts_update.advantage_estimation,
    "zero-advantage rate": facts_credit.zero_advantage,
    "pilots decide about the rest, without bias": facts_credit.adaptive_budget,
    "sampled RTPO reaches backward induction": facts_sweep.backward_induction,
    "every method learns": facts_sweep.every_method_learns,
    "exact and sampled gradients agree": facts_update.gradients_agree,
    "stale continuations": facts_update.stale_continuations,
}


def report(say: Callable[[str], None], pipeline: Pipeline) -> bool:
    """Print every fact with the expected and the measured number; whether all hold. Under a minute on one core."""
    started, wrong, count = time.perf_counter(), 0, 0
    say(f"    {'fact':<88} {'expected':<9} {'measured':<12}")
    for number, (title, fact) in enumerate(FACTS.items(), start=1):
        say(f"{number:2}  {title}")
        for line in fact(pipeline):
            wrong, count = wrong + (not line.ok), count + 1
            sign, verdict = " " if line.sign == "=" else line.sign, "ok" if line.ok else "WRONG"
            say(f"    {line.what:<86} {sign} {line.expected:<9.6g} {line.measured:<12.6g} {verdict}")
    say(f"{count - wrong} of {count} numbers as expected, {time.perf_counter() - started:.0f} s")
    return not wrong
