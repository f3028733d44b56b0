"""LoRA in the learner: adapters get the right gradient on any number of ranks, and whoever is outside sees merged weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo import folder, learner_config, run_ranks, tiny_model, tiny_tokenizer
from safetensors import safe_open
from test_learner import N_GROUPS, N_ROLLOUTS, build, changed, expected_gradient, expected_logprobs, make_samples, parameters, same
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from rtpo_ray.algorithms.base import Critic, Objective
from rtpo_ray.errors import CheckpointError, ConfigError
from rtpo_ray.policy import lora
from rtpo_ray.policy.batching import plan
from rtpo_ray.policy.learner import Learner

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]  # of a Qwen3 layer
TRAIN = dict(lr=1e-2, eps=1e-8)  # otherwise the first step is minus the gradient


def lora_config(**changes):
    return learner_config(**{"lora_rank": RANK, "lora_alpha": ALPHA, **changes})


def make(model, seed=0, dtype="float32", config=None, **objective):
    return Learner(model, config or lora_config(), objective=Objective(**objective), dtype=dtype, temperature=0.7, device="cpu", seed=seed)


def whole(value):
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).numpy().copy()


def trained(learner):
    return {name: whole(value) for name, value in learner.policy.named_parameters() if value.requires_grad}


def base(learner):
    return {name.replace(".base_layer", ""): whole(value) for name, value in learner.policy.lm.named_parameters()
            if "lora_" not in name}


@torch.no_grad()
def fill_b(learner):
    """Values for the B of every adapter, the same on any number of ranks: with 0, A would have no gradient."""
    generator = torch.Generator().manual_seed(1)
    for name, value in learner.policy.named_parameters():
        if "lora_B" in name:
            value.copy_(distribute_tensor(0.3 * torch.randn(value.shape, generator=generator), value.device_mesh, value.placements))


def share_of(samples, rank, world):
    return [sample for index, sample in enumerate(samples) if index % world == rank]


# --- what runs on the ranks


def one_step(rank, world, model, samples, export, tokenizer, recompute):
    learner = make(model, config=lora_config(recompute=recompute))
    fill_b(learner)
    learner.export(export, tokenizer)
    before, frozen = trained(learner), base(learner)
    scores = learner.score([(s.context_ids, s.response_ids) for s in samples])
    result = learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=5)
    after = trained(learner)
    unmoved = all(np.array_equal(value, frozen[name]) for name, value in base(learner).items())
    return result.optimizer_steps, before, {name: before[name] - after[name] for name in before}, scores, unmoved


def as_it_began(rank, world, model, dtype):
    plain, adapted = build(model, dtype=dtype), make(model, dtype=dtype)
    manifests = [learner.parameters_manifest() for learner in (plain, adapted)]
    sent = [[(name, value.view(torch.uint8).numpy().tobytes()) for name, value in learner.full_parameters()] for learner in (plain, adapted)]
    return manifests[0] == manifests[1], sent[0] == sent[1], len(sent[0])


def train_and_save(rank, world, model, samples, checkpoint, export, tokenizer):
    learner = make(model, config=lora_config(**TRAIN))
    for seed in range(2):
        learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=seed)
    learner.save_checkpoint(checkpoint)
    learner.export(export, tokenizer)
    saved, merged = trained(learner), parameters(learner)
    scores = learner.score([(s.context_ids, s.response_ids) for s in samples])
    unmoved = all(np.array_equal(value, dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())[name].detach())
                  for name, value in base(learner).items())
    optimized = {name for name, value in learner.policy.named_parameters() for group in learner._optimizer.param_groups
                 if any(value is each for each in group["params"])}
    learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=2)
    return saved, merged, scores, unmoved, optimized, trained(learner)


def load_and_train(rank, world, model, samples, checkpoint):
    learner = make(model, seed=99, config=lora_config(**TRAIN))
    learner.load_checkpoint(checkpoint)
    loaded, steps = trained(learner), learner.optimizer_steps
    learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=2)
    return loaded, steps, trained(learner)


def load_into_others(rank, world, model, checkpoint):
    found = []
    for config in (learner_config(), lora_config(lora_rank=2)):
        try:
            Learner(model, config, objective=Objective(), dtype="float32", temperature=0.7, device="cpu").load_checkpoint(checkpoint)
        except CheckpointError as error:
            found.append(str(error))
    return found


def drawn(rank, world, model):
    before = torch.random.get_rng_state()
    values = [trained(make(model, seed=seed)) for seed in (3, 3, 4)]
    return values, torch.equal(before, torch.random.get_rng_state())


def reference(rank, world, model, samples):
    learner = make(model, kl_coef=0.1, config=lora_config(lr=1e-6))
    fill_b(learner)
    (make_batch,) = plan(samples, 10**6, packed=learner.policy.packs)
    batch = make_batch()
    found = batch.split(learner.reference_logprobs(batch))
    policy = batch.split(learner.forward(batch)[0].detach())
    result = learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=0)
    return found, policy, result.loss, result.grad_norm, learner._reference


def value_head(rank, world, model, samples):
    learner = make(model, critic=Critic(), config=lora_config(**TRAIN))
    before = trained(learner)
    result = learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=0)
    after = trained(learner)
    return result.optimizer_steps, {name: bool((before[name] != after[name]).any()) for name in before}


def targeted(rank, world, model, targets):
    try:
        learner = make(model, config=lora_config(lora_targets=targets))
    except ConfigError as error:
        return str(error)
    return sorted({name.split(".lora_")[0].rpartition(".")[2] for name in trained(learner)})


# --- tests


@pytest.fixture(scope="module")
def samples():
    return make_samples()


@pytest.mark.parametrize(("world", "recompute"), [(1, False), (2, False), (3, False), (2, True)])
def test_the_gradient_of_adapters_follows_from_that_of_the_merged_weights(samples, world, recompute):
    """dL/dA = s B^T G and dL/dB = s G A^T, where G is the gradient by W + s B A, taken by transformers on the exported model."""
    export = str(folder() / f"lora-{world}")
    runs = run_ranks(world, one_step, tiny_model(), samples, export, tiny_tokenizer(), recompute)
    full = expected_gradient(samples, export)
    steps, before, moved, _, unmoved = runs[0]
    assert (steps, unmoved) == (1, True)
    assert len(before) == 2 * 2 * len(LINEAR)
    for name in before:
        layer, part = name.removeprefix("lm.").removesuffix(".default.weight").rsplit(".", 1)
        g, stem = full[f"{layer}.weight"], name.rsplit(".lora_", 1)[0]
        a, b = (before[f"{stem}.lora_{each}.default.weight"] for each in "AB")
        np.testing.assert_allclose(moved[name], SCALE * (b.T @ g if part == "lora_A" else g @ a.T), rtol=0, atol=1e-5, err_msg=name)
        assert np.abs(moved[name]).max() > 1e-3
    for other in runs[1:]:
        assert all(np.array_equal(other[1][name], before[name]) and np.array_equal(other[2][name], moved[name]) for name in before)


def test_merged_weights_say_what_the_adapters_say(samples):
    export = str(folder() / "lora-merged")
    (_, _, _, scores, _), = run_ranks(1, one_step, tiny_model(), samples, export, tiny_tokenizer(), False)
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    moved = 0.0
    for sample, found in zip(samples, scores, strict=True):
        assert found == pytest.approx(expected_logprobs(sample, merged).tolist(), abs=2e-5)
        moved = max(moved, float((torch.tensor(found) - expected_logprobs(sample).detach()).abs().max()))
    assert moved > 0.5  # so far away is the base model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_any_update_the_merged_model_is_the_base_to_the_bit(dtype):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tied=False), dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    path = str(folder() / "signed-zeros")
    model.save_pretrained(path)
    for found in run_ranks(2, as_it_began, path, dtype):
        assert found == (True, True, len(list(model.named_parameters())))


def test_training_checkpoint_and_export(samples):
    checkpoint, export = folder() / "lora-checkpoint", folder() / "lora-export"
    saved, merged, scores, unmoved, optimized, after = run_ranks(
        2, train_and_save, tiny_model(), samples, str(checkpoint), str(export), tiny_tokenizer())[0]
    assert unmoved and optimized == set(saved) and all("lora_" in name for name in saved)
    for world in (1, 3):
        loaded, steps, again = run_ranks(world, load_and_train, tiny_model(), samples, str(checkpoint))[world - 1]
        assert steps == 2 and loaded.keys() == saved.keys()
        assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
        same(again, after, atol=2e-5)
    keys = {key for file in checkpoint.iterdir() for key in safe_open(file, "pt").keys()}
    assert {key for key in keys if key.startswith("model.")} == {f"model.{name}" for name in saved}
    lm, info = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    same({name: value.detach().double().numpy() for name, value in lm.named_parameters()}, merged, atol=0)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    assert "peft" not in json.dumps(json.loads((Path(export) / "config.json").read_text()))
    assert [file.name for file in export.iterdir() if "adapter" in file.name] == []
    for sample, found in zip(samples, scores, strict=True):
        assert found == pytest.approx(expected_logprobs(sample, lm.eval()).tolist(), abs=2e-5)
    for messages in run_ranks(2, load_into_others, tiny_model(), str(checkpoint)):
        assert len(messages) == 2 and all(message.startswith(f"{checkpoint} could not be read: ") for message in messages)


def test_the_same_seed_draws_the_same_adapters_on_every_rank():
    runs = run_ranks(2, drawn, tiny_model())
    (first, again, other), untouched = runs[0]
    assert untouched
    for name, value in first.items():
        assert np.array_equal(value, again[name]) and np.array_equal(value, runs[1][0][0][name])
        assert "lora_B" in name and not value.any() or "lora_A" in name and not np.array_equal(value, other[name])


def test_the_reference_is_the_base_without_a_second_model(samples):
    engine = [changed(sample, engine_logprobs=expected_logprobs(sample).tolist()) for sample in samples]
    results = [run_ranks(world, reference, tiny_model(), engine) for world in (1, 2)]
    found, policy, loss, grad_norm, second = results[0][0]
    assert second is None
    for sample in samples:
        np.testing.assert_allclose(found[sample.sample_id], expected_logprobs(sample).detach(), rtol=0, atol=1e-5)
    assert max(float((policy[name] - found[name]).abs().max()) for name in found) > 0.5
    assert (loss, grad_norm) == pytest.approx(results[1][1][2:4], rel=1e-4)
    gap = [(found[s.sample_id] - policy[s.sample_id], s) for s in samples]
    kl = sum(s.weight * float((change.exp() - 1 - change).mean()) for change, s in gap) / N_GROUPS
    gain = sum(s.weight * s.advantage for s in samples) / N_GROUPS  # every ratio is 1
    assert loss == pytest.approx(0.1 * kl - gain, rel=1e-4)


def test_a_value_head_is_trained_beside_the_adapters(samples):
    rewarded = [changed(sample, reward=float(number % 2), rollout_id=sample.sample_id) for number, sample in enumerate(samples)]
    for steps, moved in run_ranks(2, value_head, tiny_model(), rewarded):
        assert steps == 1 and moved["value_head.weight"] and moved["value_head.bias"]
        assert {name for name, change in moved.items() if "lora_B" in name and not change} == set()


def test_targets():
    for targets, expected in (("all-linear", LINEAR), ("q_proj, v_proj", ["q_proj", "v_proj"])):
        assert run_ranks(2, targeted, tiny_model(tied=False), targets) == [expected] * 2
    for targets, bad in (("q_proj,query", "'query'"), ("lm_head", "'lm_head'"), ("", "''")):
        (message,) = run_ranks(1, targeted, tiny_model(tied=False), targets)
        assert message == (f"field learner.lora_targets is {targets!r}: the model has no linear layer {bad}; expected all-linear, or some of "
                           f"{', '.join(LINEAR)} (the head takes no adapter), separated by commas")


def test_merging_keeps_what_does_not_change():
    weight = torch.tensor([[-0.0, 1.0], [2.0, 3.0]])
    a, b = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.0], [0.5]])
    merged = lora.merge(weight, a, b, 4.0)
    assert merged.tolist() == [[0.0, 1.0], [4.0, -1.0]]
    assert torch.signbit(merged[0, 0])
