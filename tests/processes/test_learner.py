"""The learner on 1, 2 and 3 gloo ranks: same gradient however samples fall, refusals, scores, exports, checkpoints."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo import folder, learner_config, run_ranks, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from rtpo_ray.algorithms.base import Objective
from rtpo_ray.errors import CheckpointError, ContextMismatch, NonFiniteUpdate
from rtpo_ray.policy import modeling
from rtpo_ray.policy.learner import Learner
from rtpo_ray.types import Sample, context_hash

TEMPERATURE = 0.7
N_GROUPS = 3
N_ROLLOUTS = 8


def make_samples(count=8):
    """Ragged samples of groups of 2 to 4, with engine log-probabilities that are off by 0.01."""
    rng = random.Random(0)
    samples = []
    for i in range(count):
        context, response = ([rng.randrange(64) for _ in range(rng.randint(1, n))] for n in (9, 6))
        sample = Sample(sample_id=f"s{i}", context_ids=context, context_hash=context_hash(context), response_ids=response,
                        engine_logprobs=[0.0] * len(response), advantage=rng.uniform(-1, 1), weight=rng.choice([0.25, 0.5]))
        samples.append(changed(sample, engine_logprobs=[value - 0.01 for value in expected_logprobs(sample).tolist()]))
    return samples


def changed(sample, **fields):
    return replace(sample, **fields)


def expected_logprobs(sample, lm=None):
    """[T] by transformers alone, one sequence at a time."""
    lm = lm or AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    ids = torch.tensor([[*sample.context_ids, *sample.response_ids]])
    logprobs = torch.log_softmax(lm(ids).logits[0].float() / TEMPERATURE, dim=-1)
    start = len(sample.context_ids)
    return torch.stack([logprobs[start + t - 1, token] for t, token in enumerate(sample.response_ids)])


def prefixes(samples):
    """All that predicts something."""
    return {tuple([*s.context_ids, *s.response_ids][:end]) for s in samples for end in range(1, len(s.context_ids) + len(s.response_ids))}


def expected_gradient(samples, model=None):
    """Gradient of -1/groups sum_j weight_j/T_j sum_t A_j log pi, written down directly."""
    lm = AutoModelForCausalLM.from_pretrained(model or tiny_model(), dtype=torch.float32).eval()
    loss = [-s.weight * s.advantage / N_GROUPS * expected_logprobs(s, lm).sum() / len(s.response_ids) for s in samples]
    torch.stack(loss).sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in lm.named_parameters()}


def build(model, config=None, dtype="float32", **objective):
    return Learner(model, config or learner_config(), objective=Objective(**objective), dtype=dtype, temperature=TEMPERATURE, device="cpu")


def parameters(learner):
    return {name: value.double().numpy().copy() for name, value in modeling.full_parameters(learner.policy)}


def flat(values):
    return np.concatenate([values[name].astype(np.float64).ravel() for name in sorted(values)])


def same(left, right, atol=5e-6):  # the largest gradients are about 0.3, so this is float32 rounding
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=atol, err_msg=name)


# --- what runs on the ranks


def one_update(rank, world, model, shares, budget, changes=None, config=None):
    learner = build(model, learner_config(micro_batch_tokens=budget, **(config or {})), **(changes or {}))
    before = parameters(learner)
    result = learner.update(shares[rank], N_GROUPS, N_ROLLOUTS, seed=5)
    after = parameters(learner)
    return result, {name: before[name] - after[name] for name in before}


def refusals(rank, world, model, samples):
    """Updates whose last rank has a changed first sample: (refused, steps) or the error of each, and whether parameters stayed."""
    learner = build(model)
    before, found = parameters(learner), []
    bad_fields = ({"advantage": math.nan}, {}, {"engine_logprobs": [math.nan] * len(samples[1].response_ids)}, {"advantage": 1e30},
                  {"advantage": math.nan})
    for fields in bad_fields:
        share = [s for i, s in enumerate(samples) if i % world == rank]
        if rank == world - 1:
            share[0] = changed(share[0], **fields)
        try:
            result = learner.update(share, N_GROUPS, N_ROLLOUTS, seed=0)
            found.append((result.refused, result.optimizer_steps))
        except NonFiniteUpdate as error:
            found.append(str(error))
        now = parameters(learner)
        found.append(all((before[name] == now[name]).all() for name in before))
        before = now
    return found


def bad_shares(rank, world, model, cases):
    """What updates did whose samples on the last rank are `cases`, in turn: optimizer steps, or the error."""
    learner, found = build(model), []
    for case in cases:
        try:
            found.append(learner.update(case if rank == world - 1 else [], N_GROUPS, N_ROLLOUTS, seed=0).optimizer_steps)
        except (ContextMismatch, ValueError) as error:
            found.append((type(error), str(error)))
    return found


def scores(rank, world, model, sequences):
    learner = build(model)
    return learner.score(sequences), learner.parameters_manifest(), [(n, tuple(v.shape), v.dtype) for n, v in learner.full_parameters()]


def train_and_save(rank, world, model, samples, checkpoint, export, tokenizer):
    learner = build(model, learner_config(lr=1e-2, eps=1e-8, warmup_steps=3))
    share = [s for i, s in enumerate(samples) if i % world == rank]
    learner.update(share, N_GROUPS, N_ROLLOUTS, seed=0)
    for _ in range(2):  # the second replaces the first
        learner.save_checkpoint(checkpoint)
        learner.export(export, tokenizer)
    saved = parameters(learner)
    learner.update(share, N_GROUPS, N_ROLLOUTS, seed=1)
    return saved, parameters(learner), learner.optimizer_steps


def load_and_train(rank, world, model, samples, checkpoint):
    learner = build(model, learner_config(lr=1e-2, eps=1e-8, warmup_steps=3))
    learner.load_checkpoint(checkpoint)
    learner.update([s for i, s in enumerate(samples) if i % world == rank], N_GROUPS, N_ROLLOUTS, seed=1)
    return parameters(learner), learner.optimizer_steps


# --- tests


@pytest.mark.parametrize(("world", "budget", "order"), [(1, 1000, 0), (1, 16, 1), (2, 16, 2), (2, 40, 3), (3, 24, 4)])
def test_gradient_does_not_depend_on_ranks_budget_or_order(world, budget, order):
    samples = make_samples()
    shuffled = random.Random(order).sample(samples, k=len(samples))
    shares = [shuffled[rank::2] if rank < 2 else [] for rank in range(world)] if world > 1 else [shuffled]  # a third rank has none
    results = run_ranks(world, one_update, tiny_model(), shares, budget)
    gradient = expected_gradient(samples)
    for _, delta in results:
        same(delta, gradient)
    result = results[0][0]
    assert all(other == result for other, _ in results)
    assert result.grad_norm == pytest.approx(float(np.linalg.norm(flat(gradient))), rel=1e-4)
    assert result.loss == pytest.approx(-sum(s.weight * s.advantage for s in samples) / N_GROUPS, rel=1e-5)
    assert result.logprob_gap_mean == pytest.approx(0.01, rel=1e-3)
    assert result.logprob_gap_max == pytest.approx(0.01, rel=1e-3)
    assert result.ratio_geomean == pytest.approx(math.exp(0.01), rel=1e-5)
    assert result.k3 == pytest.approx(math.exp(0.01) - 1.01, rel=1e-2)
    assert (result.clip_fraction, result.optimizer_steps, result.refused) == (0.0, 1, "")
    assert result.tokens == sum(len(s.response_ids) for s in samples)
    assert result.unique_tokens == sum(len(prefixes(share)) for share in shares)
    assert result.learner_tokens == result.unique_tokens or budget < 1000  # of a tree that two micro-batches share, both compute the stem
    assert result.unique_tokens <= result.learner_tokens < sum(len(s.response_ids) + len(s.context_ids) for s in samples)


def test_gradient_clipping_warm_up_and_bf16():
    samples = make_samples()
    gradient = expected_gradient(samples)
    norm = float(np.linalg.norm(flat(gradient)))
    _, delta = run_ranks(2, one_update, tiny_model(), [samples[:3], samples[3:]], 40, None, {"max_grad_norm": norm / 10})[1]
    same(delta, {name: g / 10 for name, g in gradient.items()})
    _, delta = run_ranks(1, one_update, tiny_model(), [samples], 40, None, {"warmup_steps": 4})[0]
    same(delta, {name: g / 4 for name, g in gradient.items()})  # the first of four steps has a quarter of the rate
    result, delta = run_ranks(2, one_update, tiny_model(), [samples[:3], samples[3:]], 40, {"dtype": "bfloat16"})[0]
    left, right = flat(delta), flat(gradient)
    assert left @ right / np.linalg.norm(left) / np.linalg.norm(right) > 0.99
    assert result.grad_norm == pytest.approx(norm, rel=0.05)


def two_steps(rank, world, model, samples):
    learner = build(model, learner_config(lr=1e-2, eps=1e-8, weight_decay=0.1, micro_batch_tokens=1000))
    for seed in range(2):
        learner.update(samples[rank::world], N_GROUPS, N_ROLLOUTS, seed=seed)
    moments = {name: [state[each].full_tensor().numpy() for each in ("exp_avg", "exp_avg_sq")] for name, state in
               ((name.removeprefix("lm."), learner._optimizer.state[parameter]) for name, parameter in learner.policy.named_parameters())}
    return parameters(learner), moments


def test_the_fused_optimizer_is_adamw():
    """Two steps on two ranks against PyTorch's plain implementation on one."""
    samples = make_samples()
    found, moments = run_ranks(2, two_steps, tiny_model(), samples)[1]
    lm = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    plain = torch.optim.AdamW(lm.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(2):
        plain.zero_grad()
        torch.stack([-s.weight * s.advantage / N_GROUPS * expected_logprobs(s, lm).sum() / len(s.response_ids) for s in samples]).sum().backward()
        plain.step()
    same(found, {name: value.detach().double().numpy() for name, value in lm.named_parameters()}, atol=2e-4)  # tiny gradients divide themselves
    for name, parameter in lm.named_parameters():
        for value, each in zip(moments[name], ("exp_avg", "exp_avg_sq"), strict=True):
            np.testing.assert_allclose(value, plain.state[parameter][each].numpy(), rtol=0, atol=1e-5, err_msg=name)


def test_minibatches_and_epochs_agree_between_one_and_three_ranks():
    """Off-policy steps: the ratio is against the policy before the first step, and every sample is used once an epoch."""
    samples = make_samples()
    changes = {"epochs": 2, "minibatches": 3}
    settings = {"lr": 3e-2, "eps": 1e-8}
    one, delta = run_ranks(1, one_update, tiny_model(), [samples], 40, changes, settings)[0]
    three, other = run_ranks(3, one_update, tiny_model(), [samples[5:], samples[:5][::-1], []], 24, changes, settings)[2]
    same(delta, other, atol=2e-4)  # Adam divides tiny gradients by themselves, so rounding shows
    assert one.optimizer_steps == three.optimizer_steps == 6
    assert one.tokens == three.tokens == sum(len(s.response_ids) for s in samples)
    assert one.clip_fraction == three.clip_fraction > 0
    assert one.loss == pytest.approx(three.loss, rel=1e-3)
    assert one.logprob_gap_max == pytest.approx(0.01, rel=1e-2)  # measured before the first step


def test_minibatch_gradient_is_an_unbiased_mean():
    """Steps too small to matter, no momentum: the two steps of an epoch add up to twice the gradient of the whole."""
    samples = make_samples()
    result, delta = run_ranks(1, one_update, tiny_model(), [samples], 40, {"minibatches": 2}, {"lr": 1e2, "beta1": 0.0})[0]
    assert result.optimizer_steps == 2
    left, right = flat(delta), flat(expected_gradient(samples))
    assert np.linalg.norm(left / 1e-4 - 2 * right) < 0.02 * np.linalg.norm(right)


def test_recomputed_layers_have_the_same_gradient_to_the_bit():
    samples = make_samples()
    kept, again = (run_ranks(2, one_update, tiny_model(), [samples[:4], samples[4:]], 40, None, {"recompute": recompute})[0]
                   for recompute in (False, True))
    assert kept[0] == again[0]
    same(kept[1], again[1], atol=0)


def test_nothing_to_train_on():
    result, delta = run_ranks(2, one_update, tiny_model(), [[], []], 40)[1]
    assert (result.optimizer_steps, result.tokens, result.refused, result.loss) == (0, 0, "", 0.0)
    assert all((change == 0).all() for change in delta.values())


def test_non_finite_updates_are_refused_by_name_and_end_the_run():
    samples = make_samples()
    for found in run_ranks(2, refusals, tiny_model(), samples):
        assert found[0:4] == [("samples s1", 0), True, ("", 1), False]  # a good update resets the count
        assert found[4:8] == [("samples s1", 0), True, ("gradient norm", 0), True]  # 1e30: a finite loss, but its square overflows
        assert "3 updates in a row were not finite (learner.max_refused is 3); the last one because of samples s1" in found[8]
        assert found[9] is True


def test_unusable_samples_raise_on_every_rank_and_leave_the_learner_usable():
    good = make_samples(2)
    lost = changed(good[1], context_ids=[*good[1].context_ids, 1])
    long = changed(good[1], context_ids=[1] * 99, context_hash=context_hash([1] * 99))
    cases = [[good[0], lost], [good[1]] * 2, [good[0], long], [good[1]]]
    first, second = run_ranks(2, bad_shares, tiny_model(), cases)
    for found in (first, second):
        assert found[0][0] is ContextMismatch and "sample s1" in found[0][1] and lost.context_hash in found[0][1]
        assert found[1] == (ValueError, "samples s1 came more than once, expected every sample id once")
        assert found[2][0] is ValueError and "sample s1" in found[2][1] and "micro_batch_tokens = 64" in found[2][1]
        assert found[3] == 1
    assert first[0][1].startswith("learner rank 1: ")


@pytest.mark.parametrize(("tied", "capped"), [(True, False), (False, False), (True, True)])
def test_policy_logprobs_with_any_head(tied, capped):
    """Logits that are more than the head's output (here capped) come from the whole model."""
    if capped:
        shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
        torch.manual_seed(0)
        lm = Gemma2ForCausalLM(Gemma2Config(**shape, head_dim=16, final_logit_softcapping=0.5, initializer_range=0.3)).eval()
    else:
        lm = AutoModelForCausalLM.from_pretrained(tiny_model(tied), dtype=torch.float32).eval()
    policy = modeling.Policy(lm, torch.float32)
    assert policy.plain_head is not capped and policy.packs is not capped  # Gemma 2's attention slides
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
    found = policy(ids, torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]), torch.tensor([7, 8, 3]), TEMPERATURE)
    long, short = (torch.log_softmax(lm(row[None]).logits[0] / TEMPERATURE, dim=-1) for row in (ids[0], ids[1, :2]))
    found, values = found
    assert values is None
    torch.testing.assert_close(found, torch.stack([long[1, 7], long[2, 8], short[0, 3]]), rtol=0, atol=1e-5)
    assert found.dtype == torch.float32


def test_score_equals_transformers():
    samples = make_samples()
    sequences = [(s.context_ids, s.response_ids) for s in samples]
    for found, manifest, tensors in run_ranks(2, scores, tiny_model(), sequences):
        for sample, logprobs in zip(samples, found, strict=True):
            assert logprobs == pytest.approx(expected_logprobs(sample).tolist(), abs=1e-5)
        assert [(s.name, s.shape, torch.float32) for s in manifest] == tensors
        assert "lm_head.weight" not in [s.name for s in manifest]  # tied: once


def full_disk(rank, world, model, samples, path):
    """A checkpoint fails on every rank while training goes on, and the next one is whole."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    made = build(model)
    write, found = HuggingFaceStorageWriter.write_data, []

    def full(self, plan, planner):
        raise OSError(28, "No space left on device")

    HuggingFaceStorageWriter.write_data = full
    try:
        made.start_checkpoint(path)
        made.update(samples[rank::world], N_GROUPS, N_ROLLOUTS, seed=0)
        try:
            made.finish_checkpoint()
        except CheckpointError as error:
            found.append(str(error))
    finally:
        HuggingFaceStorageWriter.write_data = write
    left = [name for name in os.listdir(os.path.dirname(path)) if name.startswith(os.path.basename(path))]
    made.finish_checkpoint()  # it is said once
    made.save_checkpoint(path)
    try:
        made.load_checkpoint(path + "-broken")
    except (CheckpointError, FileNotFoundError) as error:
        found.append(type(error).__name__)
    return found, left, os.path.isdir(path)


def test_a_checkpoint_that_cannot_be_written_is_said_and_leaves_no_rest():
    path = str(folder() / "full")
    (folder() / "full-broken").mkdir()
    for found, left, whole in run_ranks(2, full_disk, tiny_model(), make_samples(), path):
        assert found[0].startswith(f"{path} could not be written: ") and "No space left on device" in found[0]
        assert found[1] == "CheckpointError" and left in ([], ["full-broken"]) and whole


def refused(rank, world, model, checkpoint):
    try:
        build(model).load_checkpoint(checkpoint)
    except CheckpointError as error:
        return str(error)


def test_a_checkpoint_is_nothing_but_tensors_and_one_that_lacks_a_shard_is_refused():
    checkpoint = folder() / "three"
    export = str(folder() / "three-export")
    saved, after, steps = run_ranks(3, train_and_save, tiny_model(), make_samples(), str(checkpoint), export, tiny_tokenizer())[0]
    shards = sorted(checkpoint.iterdir())
    assert len(shards) == 3 and {path.suffix for path in shards} == {".safetensors"}
    found, steps = run_ranks(1, load_and_train, tiny_model(), make_samples(), str(checkpoint))[0]
    same(found, after, atol=1e-5)
    for shard in shards:
        content = shard.read_bytes()
        shard.unlink()
        (message,) = run_ranks(1, refused, tiny_model(), str(checkpoint))
        assert message.startswith(f"{checkpoint} could not be read: ")
        shard.write_bytes(content)
        (message,) = run_ranks(1, refused, tiny_model(), str(checkpoint))
        assert message is None


def test_checkpoint_loads_on_other_numbers_of_ranks_and_export_reloads():
    samples = make_samples()
    checkpoint, export, tokenizer = str(folder() / "checkpoint"), str(folder() / "export"), tiny_tokenizer()
    saved, after, steps = run_ranks(2, train_and_save, tiny_model(), samples, checkpoint, export, tokenizer)[0]
    assert steps == 2
    for world in (1, 3):
        found, steps = run_ranks(world, load_and_train, tiny_model(), samples, checkpoint)[world - 1]
        assert steps == 2
        same(found, after, atol=1e-5)
    lm = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    same({name: value.detach().double().numpy() for name, value in lm.named_parameters()}, saved, atol=0)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(export).convert_tokens_to_ids("b") == 1
    assert json.loads((Path(export) / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert not [path for path in folder().iterdir() if path.suffix in (".writing", ".old")]
