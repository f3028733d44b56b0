"""The learner gang and the weight channel on real actors: ranks agree, and generators that die or lie are taken out of service."""

import random

import pytest
import ray
from players import DyingHolder, Holder, Spawn, StaleHolder, open_pool, status
from records import credited, group, turn_record
from running import end_actors, wait_until

from actors.gang import LearnerGang
from actors.publisher import WeightPublisher
from pipelines.rows import pack
from rtpo_ray import algorithms
from rtpo_ray.config import load_config
from rtpo_ray.types import Rollout
from tests.integration.tiny import VOCAB, load_tiny_qwen3, save_tiny_qwen3, score

PROBE = [11, 12, 13, 14, 15]
SENT = ("gather", "copy", "wire", "hash", "confirm")  # what the sender does one after the other


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return str(save_tiny_qwen3(tmp_path_factory.mktemp("random")))


def configured(ranks):
    return load_config(None, ["cluster.local_cpus=4", f"learner.ranks={ranks}", "learner.cpus=0.5", "learner.lr=1e-2",
                              "learner.micro_batch_tokens=128", "generators.max_model_len=128",
                              "learner.timeout=60", "weights.timeout=8", "weights.bucket_mb=1"])


def open_gang(ranks, path):
    config = configured(ranks)
    return LearnerGang(config, path, algorithms.build(config.algorithm).objective)


def stage(path):
    """Credited blocks of uneven sizes, one of them empty, whose engine log-probabilities are those of the model: (blocks, groups)."""
    rng, model = random.Random(0), load_tiny_qwen3(path)

    def sibling(name, reward):
        context, response = ([rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))] for _ in range(2))
        turn = turn_record(context=context, response=response, reward=reward, engine_logprobs=tuple(score(model, context, response)))
        return Rollout(rollout_id=name, task_id="t", turns=(turn,))

    groups = [group(*(sibling(f"g{i}/{j}", float(j == i % 3)) for j in range(3)), name=f"g{i}") for i in range(10)]
    return [credited(*groups[start:end]) for start, end in ((0, 1), (1, 5), (5, 5), (5, 7), (7, 10))], len(groups)


def test_any_number_of_ranks_computes_the_same_update_streamed_or_not(cluster, random_model):
    blocks, n_groups = stage(random_model)
    results, scores = [], []
    for ranks in (1, 2, 3):
        gang = open_gang(ranks, random_model)
        counts = gang.take([ray.put(pack(block)) for block in blocks], stream=ranks > 1).counts
        assert (counts.groups, counts.siblings, counts.trained) == (n_groups, 30, 30)
        results.append(gang.update(n_groups, 30, seed=1))
        scores.append(gang.score([(PROBE, [5, 6, 7])])[0])
        gang.close()
        end_actors()
    one, two, three = results
    for other in (two, three):
        for name in ("loss", "grad_norm", "logprob_gap_mean", "ratio_geomean", "tokens", "optimizer_steps"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-5, abs=1e-7), name
    assert one.optimizer_steps == 1 and one.grad_norm > 0.01 and one.logprob_gap_max < 1e-5 and one.tokens == sum(
        len(ids) for block in blocks for ids in block["response_ids"].to_pylist())
    before = score(load_tiny_qwen3(random_model), PROBE, [5, 6, 7])
    assert max(abs(a - b) for a, b in zip(before, scores[0], strict=True)) > 0.01  # the step was taken
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], abs=1e-3)  # Adam's first step is a sign: rounding shows where a gradient is 0


@pytest.fixture(scope="module")
def gang(ray_cluster, random_model):
    """Two ranks, shared: only its weights change from test to test."""
    end_actors()
    made = open_gang(2, random_model)
    yield made
    made.close()
    end_actors()


@pytest.fixture
def publishing(gang, random_model):
    """Makes (pool, publisher) for holders of these kinds; they hold what the gang started with. The gang survives the test."""
    pools = []

    def make(*kinds):
        pool = open_pool(Spawn(kinds, random_model), 3)
        pools.append(pool)
        return pool, WeightPublisher(gang, pool, configured(2).weights, temperature=1.0, device="cpu", probe_context=PROBE)

    yield make
    for pool in pools:
        ray.kill(pool)  # its generators end with it
    wait_until(lambda: not any("generator" in name for name in ray.util.list_named_actors()), 30, "the end of the generators")


def train(gang, path):
    """One step, so that the weights differ from what anyone holds."""
    blocks, n_groups = stage(path)
    gang.take([ray.put(pack(block)) for block in blocks], stream=True)
    assert gang.update(n_groups, 30, seed=2).optimizer_steps == 1


def gaps(gang, pool):
    """Largest log-probability gap of every member against the learner."""
    leases = ray.get(pool.members.remote(), timeout=30)
    probes = ray.get([lease.generator.probe.remote(PROBE, 4, 1.0, 0) for lease in leases], timeout=30)
    learner = gang.score([(PROBE, list(probe.token_ids)) for probe in probes])
    return {lease.member: (probe.weight_version, max(abs(a - b) for a, b in zip(probe.logprobs, own, strict=True)))
            for lease, probe, own in zip(leases, probes, learner, strict=True)}


def serving(pool):
    return {name: entry["version"] for name, entry in status(pool).items() if entry["state"] == "serving"}


def name(number):
    return f"rtpo-generator-{number}"


def test_every_push_reaches_every_generator_and_is_proved(gang, publishing, random_model):
    pool, publisher = publishing(Holder)
    hashes, connects = [], []
    for version in (1, 2):
        train(gang, random_model)
        assert all(gap > 1e-2 for _, gap in gaps(gang, pool).values())
        published = publisher.publish(version)
        assert (published.version, published.members, published.retired) == (version, tuple(map(name, range(3))), {})
        assert published.probe_gap < 1e-4 and len(published.hash) == 16
        assert published.bytes == sum(4 * parameter.numel() for parameter in load_tiny_qwen3(random_model).parameters())
        phases = published.phases
        assert set(phases) == {"connect", "push", "probe", "load", *SENT, *(f"receiver_{name}" for name in ("wire", "hash", "confirm"))}
        assert 0 < sum(phases[name] for name in SENT) < phases["push"] and 0 < phases["load"] + phases["receiver_wire"] < phases["push"]
        assert phases["push"] + phases["probe"] < published.seconds
        connects.append(phases["connect"])
        hashes.append(published.hash)
        assert all(held == version and gap < 1e-4 for held, gap in gaps(gang, pool).values())
        assert serving(pool) == dict.fromkeys(map(name, range(3)), version)
    assert hashes[0] != hashes[1] and connects[0] > connects[1]  # the group is made once
    assert publisher.publish(3).hash == hashes[1]  # the same weights again


@pytest.mark.parametrize("moment", ["before", "in the middle"])
def test_a_generator_that_dies_is_left_out_and_replaced(gang, publishing, random_model, moment):
    pool, publisher = publishing(Holder, Holder if moment == "before" else DyingHolder, Holder)
    if moment == "before":
        publisher.publish(0)  # a group exists when it dies
        victim = ray.get_actor(name(1))
        ray.kill(victim)
    train(gang, random_model)
    published = publisher.publish(1)
    assert (published.version, published.members, list(published.retired)) == (1, (name(0), name(2)), [name(1)])
    assert "died" in published.retired[name(1)].lower() and published.seconds < 60
    assert serving(pool) == {name(0): 1, name(2): 1}
    assert all(gap < 1e-4 for _, gap in gaps(gang, pool).values())

    assert ray.get(pool.fill.remote(1, 3), timeout=90) == [name(3)]  # up, and not serving yet
    assert serving(pool) == {name(0): 1, name(2): 1}
    again = publisher.publish(1)
    assert (again.members, again.retired, again.hash) == ((name(0), name(2), name(3)), {}, published.hash)
    assert serving(pool) == dict.fromkeys(map(name, (0, 2, 3)), 1)
    assert gaps(gang, pool)[name(3)][0] == 1 and all(gap < 1e-4 for _, gap in gaps(gang, pool).values())


def test_a_generator_that_reports_success_with_old_weights_is_caught_by_the_probe(gang, publishing, random_model):
    pool, publisher = publishing(Holder, StaleHolder, Holder)
    train(gang, random_model)
    published = publisher.publish(1)
    assert (published.members, list(published.retired)) == ((name(0), name(2)), [name(1)])
    assert "it samples from other weights" in published.retired[name(1)] and "weights.probe_tolerance 0.001" in published.retired[name(1)]
    assert status(pool)[name(1)]["state"] == "gone" and serving(pool) == {name(0): 1, name(2): 1}
