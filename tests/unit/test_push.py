"""What a push of weights is made of: buckets, memory that is used again, phases; and that a stage without a step pushes nothing."""

from types import SimpleNamespace

import pytest
import torch

from actors.coordinator import Coordinator, Trunks
from actors.gang import Taken
from actors.publisher import Attempt, Published, phases_of
from pipelines.counts import EpisodeCounts, StageCounts
from rtpo_ray import algorithms
from rtpo_ray.algorithms.base import Stage
from rtpo_ray.config import Config
from rtpo_ray.timeline import Timeline
from rtpo_ray.types import PushTimes, UpdateResult
from rtpo_ray.weights.buckets import KEPT, Recycled, buckets
from rtpo_ray.weights.channel import Stopwatch
from rtpo_ray.weights.hashing import TensorSpec


def test_buckets_hold_whole_tensors_in_order_at_places_that_suit_every_dtype():
    specs = [TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (2,), "float64"), TensorSpec("none", (0, 4), "float32"),
             TensorSpec("large", (30,), "float32"), TensorSpec("c", (1,), "bool")]
    found = [([(spec.name, start) for spec, start in bucket.parts], bucket.nbytes) for bucket in buckets(specs, 50)]
    assert found == [([("a", 0), ("b", 16), ("none", 32)], 32), ([("large", 0)], 120), ([("c", 0)], 1)]
    large = list(buckets(specs, 50))[1]
    assert [(piece.start, piece.stop) for piece in large.slices(50)] == [(0, 50), (50, 100), (100, 120)]
    assert list(buckets([], 50)) == []
    assert [bucket.nbytes for bucket in buckets(specs, 10**6)] == [16 + 16 + 120 + 8 + 1]  # everything, and 8 bytes between


def test_memory_of_a_bucket_is_used_again_only_when_no_tensor_refers_to_it():
    recycled = Recycled(torch.device("cpu"))
    first = recycled.take(100)
    first.fill_(7)
    part = first[10:20].view(torch.int16).view(5)
    at = first.data_ptr()
    del first
    assert recycled.take(50).data_ptr() != at and part.tolist() == [7 * 257] * 5
    del part
    again = recycled.take(60)
    assert again.data_ptr() == at
    del again
    held = [recycled.take(10**4).fill_(number) for number in range(KEPT + 3)]  # whoever keeps everything gets as much as it needs
    assert [set(each.tolist()) for each in held] == [{number} for number in range(KEPT + 3)]
    assert recycled.take(0).numel() == 0 and len(recycled._kept) == KEPT


def test_a_stopwatch_counts_phases_and_keeps_spans():
    timeline = Timeline("sender")
    watch = Stopwatch(12, timeline)
    for _ in range(2):
        with watch.phase("hash"):
            pass
    with pytest.raises(ZeroDivisionError), watch.phase("load", span=True, tensors=3):
        raise ZeroDivisionError
    times = watch.times()
    assert times.bytes == 12 and times.seconds >= times.hash + times.load > 0 and (times.copy, times.wire) == (0, 0)
    (span,) = timeline.take()
    assert (span.process, span.name, span.lane, span.details) == ("sender", "load", "load", {"tensors": 3})


def test_phases_of_a_push_are_the_senders_and_those_of_the_slowest_receiver():
    sent = PushTimes(bytes=8, seconds=9, gather=1, copy=2, wire=3, hash=0.5, confirm=0.25)
    received = [PushTimes(bytes=8, seconds=7, wire=1, load=4), PushTimes(bytes=8, seconds=8, wire=5, hash=0.5, load=2, confirm=0.125)]
    assert phases_of(Attempt("ab", {}, sent, received), probe=6.0) == {
        "probe": 6.0, "gather": 1, "copy": 2, "wire": 3, "hash": 0.5, "confirm": 0.25,
        "load": 2, "receiver_wire": 5, "receiver_hash": 0.5, "receiver_confirm": 0.125}
    assert phases_of(Attempt(), connect=1.0) == {"connect": 1.0}


class Stages(Coordinator):
    """The real stages, on updates that are given; counts pushes."""

    def __init__(self, *steps):
        results = [UpdateResult(**{**dict.fromkeys(UpdateResult.__slots__, 0), "optimizer_steps": n, "refused": why}) for n, why in steps]
        gang = SimpleNamespace(update=lambda *args: results.pop(0), start_checkpoint=lambda path: None,
                               finish_checkpoint=lambda: None)
        super().__init__(config=Config(), algorithm=algorithms.make("rtpo", {}), pool=None, gang=gang, publisher=None)
        self._folder, self.pushed = "", 0

    def _occupancy(self):
        return {}

    def _retired(self):
        return {}

    def _publish(self, version):
        self.pushed += 1
        self._version = version
        self._at = type(self._at)(version=version, updates=self._at.updates)
        return Published(version=version, hash="ab", members=(), probe_gap=0.0, seconds=0.0)


@pytest.mark.parametrize(("steps", "pushed"), [
    ([(0, "")], 0),  # all filtered, nothing credited, or nothing to learn from continuations
    ([(0, "samples a")], 0), ([(0, "gradient norm"), (0, "")], 0),  # refused at the first step
    ([(1, "samples a")], 1),  # refused at the second: the first has moved the weights
    ([(2, ""), (0, ""), (1, "")], 2)])
def test_a_stage_that_took_no_step_pushes_nothing(steps, pushed):
    made = Stages(*steps)
    taken = Taken(counts=StageCounts(), waited=0.0, overlapped=0.0)
    trunks = Trunks(episodes=None, counts=EpisodeCounts(), seconds={}, taken=taken)
    hashes = [made._stage(0, 0, Stage(turn=0, n_siblings=4), trunks)["weights_hash"] for _ in steps]
    assert (made.pushed, hashes) == (pushed, ["ab" if taken else None for taken, _ in steps])
