"""The whole loop on real parts: Ray, Ray Data, two vLLM engines, the learner gang, the weight channel."""

import json
import time

import ray
import torch
from running import wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.publisher import AsLoaded
from actors.spawn import spawn_pool
from pipelines.collect import Ask, Collection, collect_episodes, stage_samples
from pipelines.rows import table_to_rollouts, unpack
from pipelines.tasks import SeedTasks
from rtpo_ray import algorithms
from rtpo_ray.config import AlgorithmConfig, load_config
from rtpo_ray.types import derive_seed

STAGE = {"kind", "sweep", "turn", "groups", "siblings", "success", "zero_advantage_rate", "weight_version", "generated_tokens", "prompt_tokens",
         "cached_prompt_tokens", "failed", "filtered", "logprob_gap_mean", "logprob_gap_max", "ratio_geomean", "loss", "grad_norm", "seconds"}
STAGE_TOO = {"k3", "failed_first", "trained", "clip_fraction", "optimizer_steps", "refused", "trained_tokens", "learner_tokens", "unique_tokens",
             "weights_hash", "probe_gap", "retired", "unsaved", "time", "shareable_prompt_tokens", "occupancy", "push"}
SWEEP = {"kind", "sweep", "tasks", "trunk_success", "trunk_turns_mean", "seconds"}
SWEEP_TOO = {"occupancy", "unsaved", "time", "retired", "trunk_ends", "failed", "failed_first", "generated_tokens", "weight_version"}
EVAL = {"kind", "sweep", "tokens", "tasks", "success", "success_greedy", "turns_mean", "tool_calls_mean", "malformed_calls", "ends"}
EVAL_TOO = {"success_low", "success_high", "samples", "return_mean", "executed_calls", "failed_calls", "truncation_rate", "tokens_per_success",
            "unsaved", "time", "retired", "weight_version", "failed", "failed_first", "seconds"}
SECONDS = {"generate", "credit", "overlapped", "learn", "broadcast", "other", "total"}


def test_two_sweeps_of_rtpo(two_sweeps, tiny_model):
    (events, folder), (_, start) = two_sweeps, tiny_model
    stages, sweeps, evals = ([event for event in events if event["kind"] == kind] for kind in ("stage", "sweep", "eval"))
    assert [(event["sweep"], event["tasks"]) for event in evals] == [(0, 16), (2, 16)]
    assert [event["tokens"] for event in evals] == [0, sum(event["generated_tokens"] for event in (*stages, *sweeps))]
    assert [(event["sweep"], event["tasks"]) for event in sweeps] == [(0, 32), (1, 32)]
    assert all(set(event) == STAGE | STAGE_TOO and set(event["seconds"]) == SECONDS for event in stages)
    assert all(set(event) == SWEEP | SWEEP_TOO and set(event["seconds"]) == SECONDS for event in sweeps)
    assert all(set(event) == EVAL | EVAL_TOO for event in evals)

    # Turns from the last that a trunk reached down to the first, each sweep closed by its summary.
    order = [(event["sweep"], -1 if event["kind"] == "sweep" else event["turn"]) for event in events if event["kind"] != "eval"]
    assert order == sorted(order, key=lambda where: (where[0], -where[1])) and len(set(order)) == len(order)
    assert {(sweep, turn) for sweep in (0, 1) for turn in (1, 0, -1)} <= set(order) and {turn for _, turn in order} == {2, 1, 0, -1}

    version = 0
    for event in stages:
        assert event["weight_version"] == version
        assert event["optimizer_steps"] == (1 if event["trained"] else 0) and event["refused"] == "" and event["retired"] == {}
        assert event["groups"] * 4 == event["siblings"] == event["trained"] + sum(event["filtered"].values()) + sum(event["failed"].values())
        assert event["failed"] == {} and set(event["filtered"]) <= {"zero_advantage"}
        assert event["generated_tokens"] >= event["siblings"]
        if event["trained"]:
            assert 0 <= event["logprob_gap_mean"] <= event["logprob_gap_max"] <= 1e-4 and abs(event["ratio_geomean"] - 1) <= 1e-4
            assert event["push"]["bytes"] == 4 * sum(tensor.numel() for tensor in AutoModelForCausalLM.from_pretrained(start).parameters())
            assert event["probe_gap"] <= 1e-4 and len(event["weights_hash"]) == 16 and event["grad_norm"] > 0
        else:
            assert event["weights_hash"] is event["probe_gap"] is event["logprob_gap_max"] is None and event["grad_norm"] == 0
        assert event["zero_advantage_rate"] == event["filtered"].get("zero_advantage", 0) / event["siblings"]
        version += event["optimizer_steps"]
    assert version >= 2, "hardly any group had unequal returns, so this run shows nothing"
    assert [event["weight_version"] for event in evals] == [0, version]
    hashes = [event["weights_hash"] for event in stages if event["weights_hash"]]
    assert len(set(hashes)) == len(hashes) == version
    assert all(event["siblings"] == 32 * 4 for event in stages if event["turn"] == 0)  # every trunk has a first boundary

    # Evaluations beside the trunks of the next sweep, and a timeline of both sweeps.
    assert [event["kind"] for event in events].index("eval") < [event["kind"] for event in events].index("stage")
    for sweep in (0, 1):
        trace = json.loads((folder / "timeline" / f"sweep-{sweep:06d}.json").read_text())["traceEvents"]
        tracks = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
        seen = {(tracks[event["pid"]], event["name"]) for event in trace if event["ph"] in "Xb"}
        assert {("rtpo-coordinator", "trunks"), ("rtpo-coordinator", "turn 0: samples"), ("rtpo-learner-0", "update"),
                ("rtpo-generator-0", "sampling"), ("rtpo-generator-1", "sampling"), ("rtpo-generator-0", "sibling")} <= seen
        assert (("rtpo-coordinator", "evaluation") in seen) == (sweep == 0)

    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (start, folder / "final"))
    assert before.keys() == after.keys()
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    assert unchanged == [] and all(torch.isfinite(tensor).all() for tensor in after.values())
    assert AutoTokenizer.from_pretrained(folder / "final").chat_template == AutoTokenizer.from_pretrained(start).chat_template
    wait_until(lambda: not ray.util.list_named_actors(), 30, "the actors of the run to end with it")


EVERY_SIBLING = AlgorithmConfig(args={"n_siblings": 4, "kl_coef": 0.1})  # with a KL term all siblings are trained, so all their tokens come out


def first_sweep(pool, config, blocks):
    """Trunks and the siblings of turn 0 as token ids, from the seeds of the first sweep."""
    batch = SeedTasks(config.run.seed).training(0, config.sampling.tasks_per_sweep)
    asks = [Ask(seed=derive_seed(config.run.seed, *where), temperature=1.0, keep_boundaries=keep)
            for where, keep in ((("trunks", 0), True), (("siblings", 0, 0), False))]
    last = algorithms.build(EVERY_SIBLING).stages(config.environment.max_turns)[-1]
    collection = Collection(pool=pool, version=0, retries=0, deadline=time.time() + config.sampling.stage_timeout)
    trunks = collect_episodes(batch, "trunks", asks[0], collection, blocks)
    rollouts = [rollout for ref in trunks.to_arrow_refs() for rollout in table_to_rollouts(ray.get(ref))]
    rows = [row for ref in stage_samples(trunks, last, EVERY_SIBLING, asks[1], collection) for row in unpack(ray.get(ref)).to_pylist()]
    return ([(task.task_id, task.seed) for task in batch],
            {rollout.rollout_id: [(turn.seed, turn.response_ids) for turn in rollout.turns] for rollout in rollouts},
            {row["rollout_id"]: (row["group_id"], tuple(row["response_ids"])) for row in rows})


def test_the_same_seed_samples_the_same_siblings_and_siblings_differ(cluster, tiny_model, record_property):
    overrides, start = tiny_model
    config = load_config(None, overrides)
    pool, filling = spawn_pool(config, start)
    ray.get(filling, timeout=config.cluster.start_timeout)
    assert len(AsLoaded(pool).publish(0).members) == 2

    (ids, trunks, siblings), (ids_again, trunks_again, again) = first_sweep(pool, config, 2), first_sweep(pool, config, 3)  # other batches too
    assert ids == ids_again and trunks.keys() == trunks_again.keys() and siblings.keys() == again.keys() and len(siblings) == 32 * 4
    assert [turns[0][0] for turns in trunks.values()] == [trunks_again[name][0][0] for name in trunks]
    shares = [sum(one[name] != two[name] for name in one) / len(one) for one, two in ((trunks, trunks_again), (siblings, again))]
    record_property("share of trunks and siblings that differ", shares)
    print(f"share that differs between two runs of one seed: trunks {shares[0]:.2%}, siblings {shares[1]:.2%}")
    assert shares[1] <= 0.01 and shares[0] <= 0.05

    groups = {}
    for group, response in siblings.values():
        groups.setdefault(group, []).append(response)
    assert len(groups) == 32 and {len(group) for group in groups.values()} == {4}
    assert sum(len(set(group)) > 1 for group in groups.values()) >= 30  # two of four may draw the same words
    assert len({response for _, response in siblings.values()}) > 32

    ids_other, _, other = first_sweep(pool, load_config(None, [*overrides, "run.seed=4"]), 2)
    assert not {seed for _, seed in ids} & {seed for _, seed in ids_other}
    assert sum(siblings[name] == other[name] for name in siblings) < 0.2 * len(siblings)
