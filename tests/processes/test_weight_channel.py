"""The weight channel: the same bytes and hash at every receiver, and failures that say who was missing before a deadline."""

import itertools
import time

import pytest
import torch
from gloo import run_ranks, tiny_model
from transformers import AutoModelForCausalLM

from rtpo_ray.errors import WeightSyncError
from rtpo_ray.network import open_store
from rtpo_ray.timeline import Timeline
from rtpo_ray.weights.buckets import buckets
from rtpo_ray.weights.channel import WeightChannel
from rtpo_ray.weights.hashing import TensorSpec, WeightsHash, spec_of

HOST = "127.0.0.1"


def hash_of(*named):
    digest = WeightsHash()
    for name, tensor in named:
        digest.add(name, tensor)
    return digest.hexdigest()


def specs_of(tensors):
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def odd_tensors(version):
    """Shapes and dtypes that do not align with buckets or words."""
    torch.manual_seed(version)
    return {"a": torch.randn(7, 3).bfloat16(), "scalar": torch.tensor(float(version)), "empty": torch.zeros(0, 4),
            "flags": torch.tensor([True, False, True]), "big": torch.randn(50, 10),
            "wide": torch.randn(3, 5, dtype=torch.float64), "ids": torch.arange(5)}


# --- what runs on the ranks


def transfer(rank, world, port, bucket_bytes):
    """Versions 1 and 2 of `odd_tensors`: (versions, hashes, whether all tensors were equal)."""
    channel = WeightChannel(f"odd-{bucket_bytes}", rank, world, HOST, port, "cpu", 10.0, bucket_bytes)
    found = []
    for version in (1, 2):
        tensors = odd_tensors(version)
        if rank == 0:
            found.append((version, channel.send(version, specs_of(tensors), tensors.items()), True))
        else:
            incoming = channel.receive()
            got = dict(incoming.tensors())
            equal = incoming.times.bytes == sum(spec.nbytes for spec in incoming.specs) and list(got) == list(tensors) and all(
                got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in tensors.items())
            found.append((incoming.version, incoming.hash, equal))
    channel.close()
    return found


def transfer_model(rank, world, port, path):
    """A tied bf16 model into a receiver with other weights; its logits afterwards."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    channel = WeightChannel("model", rank, world, HOST, port, "cpu", 10.0, 4096)
    if rank == 0:
        named = dict(lm.named_parameters())
        digest = channel.send(7, specs_of(named), named.items())
    else:
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.zero_()
            incoming = channel.receive()
            for name, tensor in incoming.tensors():
                lm.get_parameter(name).copy_(tensor)
        digest = incoming.hash
    with torch.no_grad():
        return digest, lm(torch.arange(8)[None]).logits.float().numpy()


def deserted(rank, world, port, taken):
    """Rank 2 leaves after `taken` tensors, without the confirmation. What the others see, also when they try again, and the tensors
    that the sender did not read."""
    channel = WeightChannel(f"deserted-{taken}", rank, world, HOST, port, "cpu", 2.0, 64)
    tensors = odd_tensors(1)
    left = list(tensors.items())
    try:
        if rank == 0:
            channel.send(1, specs_of(tensors), (left.pop(0) for _ in range(len(left))))
        elif rank == 1:
            list(channel.receive().tensors())
        else:
            list(itertools.islice(channel.receive().tensors(), taken))
            channel.close()
    except WeightSyncError as error:
        first = str(error)
        with pytest.raises(WeightSyncError, match="unusable since .*; build a new channel"):
            channel.send(2, specs_of(tensors), tensors.items()) if rank == 0 else channel.receive()
        return first, len(left)
    return "", len(left)


# --- tests


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_receivers_get_equal_tensors_and_hash_twice(bucket_bytes):
    store = open_store(HOST, 10.0)
    sender, *receivers = run_ranks(3, transfer, store.port, bucket_bytes)
    assert receivers == [sender, sender]
    assert [version for version, _, _ in sender] == [1, 2]
    assert [digest for _, digest, _ in sender] == [hash_of(*odd_tensors(version).items()) for version in (1, 2)]


def test_tied_bfloat16_model():
    store = open_store(HOST, 10.0)
    (digest, logits), *receivers = run_ranks(3, transfer_model, store.port, tiny_model())
    assert abs(logits).max() > 0.1
    for found, theirs in receivers:
        assert found == digest
        assert (theirs == logits).all()


def test_receiver_that_leaves_in_the_middle_is_noticed():
    """The broadcasts alone may succeed at the sender; it must fail all the same, read its tensors to the end, and refuse further use."""
    store = open_store(HOST, 10.0)
    start = time.monotonic()
    (sender, left), (receiver, _), (leaver, _) = run_ranks(3, deserted, store.port, 1)
    assert "rank 0 of 3: waited at most 2 s for a bucket of version 1" in sender and "receivers (ranks 1 to 2)" in sender
    assert left == 0
    assert "rank 1 of 3: waited at most 2 s for a bucket of version 1" in receiver
    assert leaver == ""
    (sender, left), (receiver, _), (leaver, _) = run_ranks(3, deserted, store.port, len(odd_tensors(1)))
    assert "rank 0 of 3: waited 2 s for the hash of version 1; absent: rank 2" in sender
    assert (left, receiver, leaver) == (0, "", "")
    assert time.monotonic() - start < 20


def test_absent_receiver_is_named_before_the_deadline():
    store = open_store(HOST, 5.0)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="early, rank 0 of 3: waited 0.3 s for ranks of the 3 to join; absent: rank 1, rank 2"):
        WeightChannel("early", 0, 3, HOST, store.port, "cpu", 0.3, 64)
    assert time.monotonic() - start < 3


def test_absent_sender_is_named_before_the_deadline():
    store = open_store(HOST, 5.0)
    port = store.port
    del store
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"channel late, rank 1 of 2: waited at most 0.5 s for the weight store at {HOST}:{port}"):
        WeightChannel("late", 1, 2, HOST, port, "cpu", 0.5, 64)
    assert time.monotonic() - start < 5


def test_sender_alone():
    store = open_store(HOST, 5.0)
    timeline = Timeline("sender")
    channel = WeightChannel("alone", 0, 1, HOST, store.port, "cpu", 5.0, 64, timeline)
    tensors = odd_tensors(3)
    assert channel.send(3, specs_of(tensors), tensors.items()) == hash_of(*tensors.items())
    total = sum(spec.nbytes for spec in specs_of(tensors))
    assert channel.times.bytes == total and channel.times.load == 0
    assert 0 < channel.times.hash + channel.times.copy + channel.times.wire + channel.times.confirm < channel.times.seconds
    *sent, whole = timeline.take()
    assert whole.name == "send version 3" and {span.name for span in sent} == {"bucket"}
    packed = list(buckets(specs_of(tensors), 64))
    assert [span.details["bytes"] for span in sent] == [min(64, bucket.nbytes - start) for bucket in packed for start in range(0, bucket.nbytes, 64)]
    assert all(one.end <= two.start for one, two in itertools.pairwise(sent)) and whole.start <= sent[0].start and sent[-1].end <= whole.end
    with pytest.raises(ValueError, match="rank 0 is the sender"):
        channel.receive()
    channel.close()
    with pytest.raises(WeightSyncError, match="unusable since it was closed"):
        channel.send(4, specs_of(tensors), tensors.items())


@pytest.mark.parametrize(("specs", "message"), [
    ([TensorSpec("a", (2,), "float32")], "tensor b is not among the 1 announced"),
    ([TensorSpec("a", (2,), "float32"), TensorSpec("c", (2,), "float32")], r"next tensor is \('b', .*, expected \('c'"),
    ([TensorSpec("a", (2,), "bfloat16")], r"next tensor is \('a', \(2,\), 'float32'\), expected \('a', \(2,\), 'bfloat16'\)"),
    ([TensorSpec(name, (2,), "float32") for name in "abc"], r"next tensor is \('nothing'"),
])
def test_tensors_that_are_not_what_was_announced(specs, message):
    store = open_store(HOST, 5.0)
    channel = WeightChannel("wrong", 0, 1, HOST, store.port, "cpu", 5.0, 64)
    with pytest.raises(WeightSyncError, match=message):
        channel.send(1, specs, iter([("a", torch.zeros(2)), ("b", torch.zeros(2))]))


def test_hash_sees_every_byte_and_every_order():
    torch.manual_seed(0)
    tensor, other = torch.randn(5, 7).bfloat16(), torch.randn(5, 7).bfloat16()
    seen = {hash_of(("a", tensor), ("b", other))}
    raw = tensor.view(torch.uint8)
    for index in range(raw.numel()):
        flipped = raw.clone()
        flipped.view(-1)[index] ^= 1 << index % 8
        seen.add(hash_of(("a", flipped.view(torch.bfloat16)), ("b", other)))
    assert len(seen) == 1 + raw.numel()
    variants = [[("b", other), ("a", tensor)], [("a", other), ("b", tensor)], [("a", tensor)], [("a", tensor.view(7, 5)), ("b", other)],
                [("a", tensor.view(torch.float16)), ("b", other)]]
    assert len(seen | {hash_of(*variant) for variant in variants}) == len(seen) + len(variants)


def test_hash_sees_exchanged_elements():
    """Also of floats that differ in one bit, where sums of position times value would be equal."""
    for pair in ((1.0, -1.0), (1.0, 2.0), (0.0, -0.0)):
        hashes = set()
        for first, second in ((0, 1), (0, 2), (1, 3), (5, 1000), (8, 131080), (3, 200000)):
            values = torch.full((200001,), 7.0)
            values[first], values[second] = pair
            exchanged = values.clone()
            exchanged[first], exchanged[second] = pair[1], pair[0]
            hashes |= {hash_of(("a", values)), hash_of(("a", exchanged))}
        assert len(hashes) == 12


def test_hash_is_the_same_in_pieces_of_any_size(monkeypatch):
    """As on a GPU, where all rows are read at once."""
    torch.manual_seed(0)
    tensors = [("a", torch.randn(300, 700)), ("b", torch.randn(40000).bfloat16()), ("c", torch.randn(5))]
    hashes = set()
    for rows in (1, 7, 16, 1000):
        monkeypatch.setattr(WeightsHash, "_CPU_ROWS", rows)
        hashes.add(hash_of(*tensors))
    assert len(hashes) == 1


def test_hash_does_not_depend_on_alignment_or_contiguity():
    base = torch.arange(41, dtype=torch.int16)
    assert hash_of(("a", base[1:41])) == hash_of(("a", base[1:41].clone()))
    grid = torch.randn(6, 4)
    assert hash_of(("a", grid.t())) == hash_of(("a", grid.t().contiguous()))
