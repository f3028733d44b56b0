"""What the coordinator refuses and reports, on plain numbers."""

from collections import Counter

import pytest

from actors.coordinator import Coordinator, _phases, rate, stage_event
from actors.publisher import Published
from pipelines.counts import StageCounts
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import Config
from rtpo_ray.errors import ConservationError, WeightSyncError
from rtpo_ray.types import UpdateResult

STAGE = Stage(turn=1, n_siblings=4)


def check(**counts):
    made = Coordinator(config=Config(), algorithm=algorithms.build(Config().algorithm), pool=None, gang=None, publisher=None)
    made._check(StageCounts(**counts), 5, STAGE, 3)


def test_a_stage_that_adds_up_passes():
    check(siblings=12, trained=4, filtered=Counter(zero_advantage=4), failed=Counter({"E: x": 4}), versions=frozenset({0}))
    check(siblings=12, failed=Counter({"E: x": 12}))


@pytest.mark.parametrize("counts", [
    {"siblings": 11, "trained": 11}, {"siblings": 13, "trained": 13}, {"siblings": 12, "trained": 11}, {"siblings": 11, "trained": 12},
    {"siblings": 12, "trained": 8, "failed": Counter(x=5)}])
def test_lost_or_doubled_siblings_are_refused_with_the_numbers(counts):
    with pytest.raises(ConservationError, match=rf"sweep 5, turn 1: 3 boundaries x 4 siblings = 12 were asked for; {counts['siblings']} came back, "
                                                rf"{counts['trained']} trained"):
        check(**counts)


def test_stale_samples_are_refused():
    with pytest.raises(WeightSyncError, match=r"sweep 5, turn 1: siblings were sampled by weight versions \[0, 3\]; expected only 0"):
        check(siblings=12, trained=12, versions=frozenset({3, 0}))


def test_rates_of_nothing_are_none():
    assert (rate(1, 4), rate(0, 4), rate(0, 0)) == (0.25, 0.0, None)


def test_phases_and_other_add_up_to_the_total():
    phases = _phases([{"generate": 1.0}, {"generate": 2.0, "credit": 0.5, "learn": 2.0, "broadcast": 1.0, "other": 9.0, "total": 9.0}], 7.0)
    assert phases == {"generate": 3.0, "credit": 0.5, "learn": 2.0, "broadcast": 1.0, "other": 1.0, "total": 7.0}


def update(**changes):
    fields = {name: 0 for name in UpdateResult.__slots__}
    return UpdateResult(**{**fields, "refused": "", **changes})


def test_the_event_of_a_stage():
    counts = StageCounts(groups=3, informative_groups=1, siblings=12, successes=9, trained=4, filtered=Counter(zero_advantage=8),
                         versions=frozenset({6}))
    published = Published(version=7, hash="ab", members=("g",), probe_gap=1e-6, seconds=1.0)
    event = stage_event(2, STAGE, counts, update(tokens=40, logprob_gap_max=0.5), published)
    assert (event["kind"], event["sweep"], event["turn"], event["success"], event["weight_version"]) == ("stage", 2, 1, 0.75, 6)
    assert event["zero_advantage_rate"] == pytest.approx(2 / 3)
    assert (event["trained"], event["filtered"], event["failed"]) == (4, {"zero_advantage": 8}, {})
    assert (event["weights_hash"], event["logprob_gap_max"]) == ("ab", 0.5)
    empty = stage_event(2, STAGE, StageCounts(), update(), None)
    rates = ("success", "zero_advantage_rate", "weight_version", "logprob_gap_max", "ratio_geomean", "weights_hash")
    assert [empty[name] for name in rates] == [None] * 6
