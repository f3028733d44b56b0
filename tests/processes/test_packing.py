"""Packed micro-batches against one sequence at a time: the same gradient for siblings, chains, duplicates and single tokens, with any learner;
models that cannot be packed say so and are padded."""

import functools
import logging

import numpy as np
import pytest
import torch
from gloo import folder, learner_config, run_ranks, tiny_model, tiny_tokenizer
from test_forest import forest_of, prefixes
from test_learner import N_GROUPS, N_ROLLOUTS, build, changed, expected_gradient, expected_logprobs, one_update, parameters, same
from test_lora import LINEAR, SCALE, fill_b, lora_config, make, share_of, trained
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rtpo_ray.policy import attention, modeling


@functools.cache
def llama():
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2)
    path = str(folder() / "llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@functools.cache
def forest():
    samples = forest_of(2, groups=3)
    return [changed(sample, advantage=1.0 - 0.3 * (number % 7), weight=0.25 + 0.25 * (number % 2)) for number, sample in enumerate(samples)]


@functools.cache
def gradient_of(model):
    return expected_gradient(forest(), model)


@pytest.mark.parametrize(("world", "model", "config"), [
    (1, "qwen3", {}), (1, "llama", {}), (2, "llama", {"recompute": True}), (2, "qwen3", {"micro_batch_tokens": 150}),
    (1, "qwen3", {"share_prefixes": False})], ids=str)
def test_the_gradient_is_that_of_one_sequence_at_a_time(world, model, config):
    samples, path = forest(), llama() if model == "llama" else tiny_model()
    shares = [samples[:9], samples[9:]] if world == 2 else [samples]
    budget = config.get("micro_batch_tokens", 1000)
    changes = {name: value for name, value in config.items() if name != "micro_batch_tokens"}
    result, delta = run_ranks(world, one_update, path, shares, budget, None, changes)[0]
    same(delta, gradient_of(path), atol=3e-5)  # the largest is about 5
    unique = sum(len(prefixes(share)) for share in shares)
    assert result.unique_tokens == unique
    if config.get("share_prefixes", True) and budget == 1000:
        assert result.learner_tokens == unique
    if not config.get("share_prefixes", True):
        assert result.learner_tokens == sum(len(s.context_ids) + len(s.response_ids) - 1 for s in samples)


def adapters(rank, world, model, samples, export, tokenizer):
    learner = make(model, config=lora_config(recompute=True, micro_batch_tokens=1000))
    fill_b(learner)
    learner.export(export, tokenizer)
    before = trained(learner)
    learner.update(share_of(samples, rank, world), N_GROUPS, N_ROLLOUTS, seed=5)
    after = trained(learner)
    return learner.policy.packs, before, {name: before[name] - after[name] for name in before}


def test_adapters_too():
    export = str(folder() / "packed-lora")
    packs, before, moved = run_ranks(2, adapters, llama(), forest(), export, tiny_tokenizer())[0]
    full = expected_gradient(forest(), export)
    assert packs and len(moved) == 2 * 2 * len(LINEAR)
    for name in before:
        layer, part = name.removeprefix("lm.").removesuffix(".default.weight").rsplit(".", 1)
        g, stem = full[f"{layer}.weight"], name.rsplit(".lora_", 1)[0]
        a, b = (before[f"{stem}.lora_{each}.default.weight"] for each in "AB")
        np.testing.assert_allclose(moved[name], SCALE * (b.T @ g if part == "lora_A" else g @ a.T), rtol=0, atol=3e-5, err_msg=name)


def chunked(rank, world, model, samples, size):
    modeling.LOGITS_BYTES, before = size, modeling.LOGITS_BYTES
    try:
        return one_update(rank, world, model, [samples[rank::world]] * world, 1000)
    finally:
        modeling.LOGITS_BYTES = before


@pytest.mark.parametrize("tied", [True, False])
def test_logits_in_chunks_have_the_same_gradient(tied):
    """7 positions of 64 words at a time, on two ranks, whose head lies in FSDP2's root unit."""
    samples = forest()
    _, delta = run_ranks(2, chunked, tiny_model(tied), samples, 7 * 64 * 4)[1]
    same(delta, gradient_of(tiny_model(tied)), atol=3e-5)


def test_a_chunk_of_logits_is_all_that_lives(monkeypatch):
    head, sizes = torch.nn.Linear(8, 100, bias=False), []
    head.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    hidden, labels = torch.randn(50, 8, requires_grad=True), torch.arange(50)
    monkeypatch.setattr(modeling, "LOGITS_BYTES", 100 * 4 * 16)
    found = modeling.token_logprobs(head, hidden, labels, 0.7)
    assert sizes == [16, 16, 16, 2]
    torch.testing.assert_close(found, torch.log_softmax(head(hidden) / 0.7, -1)[labels, labels])
    sizes.clear()
    found.sum().backward()
    assert sorted(sizes) == [2, 16, 16, 16]  # again, for the backward pass
    monkeypatch.undo()
    sizes.clear()
    modeling.token_logprobs(head, hidden, labels, 0.7)
    assert sizes == [50]


def traced(rank, world, model, samples):
    compile_ = torch.compile
    torch.compile = functools.partial(compile_, backend="aot_eager")
    try:
        return one_update(rank, world, model, [samples], 1000, None, {"compile": True})
    finally:
        torch.compile = compile_


def test_compiled_layers_have_the_same_gradient():
    """Traced and differentiated as for a compiler; what makes machine code of it would take too long here."""
    model = tiny_model(layers=1)
    (_, delta), = run_ranks(1, traced, model, forest(), deadline=240.0)
    same(delta, expected_gradient(forest(), model), atol=3e-5)


# --- models that cannot


SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


@pytest.mark.parametrize(("made", "reason"), [
    (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16)), "it has layers of sliding_attention"),
    (lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=32)), "its attention slides over 32 tokens"),
    (lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)), ""),
    (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)), "")],
    ids=["gemma2", "sliding", "full", "gpt2"])
def test_what_cannot_be_packed_is_said_once_and_padded(caplog, made, reason):
    torch.manual_seed(0)
    lm = made().eval()
    with caplog.at_level(logging.WARNING, "rtpo_ray"):
        policy = modeling.Policy(lm, torch.float32)
    said = [record.message for record in caplog.records if record.name.startswith("rtpo_ray")]
    assert said == ([f"{type(lm).__name__}: {reason}, so micro-batches are padded and share no prefixes"] if reason else [])
    assert policy.packs is not bool(reason) and (lm.config._attn_implementation == attention.FOREST) is policy.packs


def test_a_probe_finds_a_model_that_computes_something_else(caplog, monkeypatch):
    """One whose attention forgets what is far away, though its configuration does not say so."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda q, k, v, **options: 1.1 * real(q, k, v, **options)
                        if options.get("attn_mask") is not None else real(q, k, v, **options))
    with caplog.at_level(logging.WARNING, "rtpo_ray"):
        assert not attention.use_forest(lm)
    assert "Qwen3ForCausalLM: packed, its logits differ by " in caplog.text and lm.config._attn_implementation == "sdpa"


def padded_update(rank, world, model, samples):
    learner = build(model, learner_config(micro_batch_tokens=1000))
    learner.policy.packs = False
    before = parameters(learner)
    learner.update(samples[rank::world], N_GROUPS, N_ROLLOUTS, seed=5)
    after = parameters(learner)
    return {name: before[name] - after[name] for name in before}, learner.score([(s.context_ids, s.response_ids) for s in samples[:3]])


def test_padded_rows_still_have_the_gradient():
    delta, scores = run_ranks(1, padded_update, llama(), forest())[0]
    same(delta, gradient_of(llama()), atol=3e-5)
    assert len(scores) == 3


def scores_of(rank, world, model, sequences):
    return build(model, learner_config(micro_batch_tokens=100)).score(sequences)


def test_scores_are_those_of_transformers_alone():
    lm = AutoModelForCausalLM.from_pretrained(llama(), dtype=torch.float32).eval()
    for sample, found in zip(forest(), run_ranks(1, scores_of, llama(), [(s.context_ids, s.response_ids) for s in forest()])[0], strict=True):
        assert found == pytest.approx(expected_logprobs(sample, lm).tolist(), abs=2e-5)
