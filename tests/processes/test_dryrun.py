"""The dry run: parameters and memory of known models, what fits and what is refused, and the memory model against a measured step."""

import gc
import json
import random
import re
from pathlib import Path

import psutil
import pytest
import torch
from gloo import folder, learner_config, run_ranks
from test_config import CONF
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config, Qwen3ForCausalLM

from rtpo_ray import cli
from rtpo_ray.algorithms.base import Algorithm, Objective, Stage
from rtpo_ray.config import LearnerConfig, load_config
from rtpo_ray.dryrun import _full_trunks, _starts, nodes_of
from rtpo_ray.errors import ConfigError
from rtpo_ray.policy import memory, modeling, tiny
from rtpo_ray.policy.learner import Learner
from rtpo_ray.policy.memory import activations_of, blueprint, rank_memory, size_of
from rtpo_ray.types import Sample, context_hash

SHAPES = {  # as published
    "1.7b": dict(num_hidden_layers=28, hidden_size=2048, num_attention_heads=16, intermediate_size=6144, tie_word_embeddings=True),
    "4b": dict(num_hidden_layers=36, hidden_size=2560, num_attention_heads=32, intermediate_size=9728, tie_word_embeddings=True),
    "8b": dict(num_hidden_layers=36, hidden_size=4096, num_attention_heads=32, intermediate_size=12288, tie_word_embeddings=False)}
SMALL = dict(vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             max_position_embeddings=4096, tie_word_embeddings=True)


def qwen3(name):
    return Qwen3Config(**SHAPES[name], num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder a model, with config.json and nothing else."""
    root = tmp_path_factory.mktemp("models")
    for name in SHAPES:
        qwen3(name).save_pretrained(root / name)
    return root


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)


def run(capsys, *words):
    """(exit code, what was said, the error)."""
    code = cli.main(["train", "--dry-run", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


# --- the shipped configurations


@pytest.mark.parametrize(("name", "parameters"), [("1.7b", "1.72 B"), ("4b", "4.02 B"), ("8b", "8.19 B")])
def test_each_shipped_configuration_fits_eight_gpus_of_80_gb_as_its_comment_says(capsys, models, name, parameters):
    file = CONF / f"qwen3-{name}.yaml"
    code, said, error = run(capsys, "--config", file, "--nodes", 1, f"model.path={models / name}")
    assert (code, error) == (0, "") and said.endswith("it fits\n")
    assert f"{parameters} parameters, all trained" in said and "node 0: ranks 4, generators 4, 8 of 8 GPUs" in said
    comment = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#")).split("80 GB:")[1]
    figures = re.findall(r"(\d+\.\d+ [GM]B|\d+,\d{3}|\d+ sequences)", comment)
    otherwise = re.search(r"\((\d+\.\d+ GB)\s", comment)  # what it would be without recomputing
    assert len(figures) >= 10
    assert [figure for figure in figures if figure not in said and not (otherwise and figure == otherwise[1])] == []
    if otherwise:
        code, said, error = run(capsys, "--config", file, "--nodes", 1, f"model.path={models / name}", "learner.recompute=false")
        assert code == 2 and f"activations {otherwise[1]}" in said
        assert "learner.micro_batch_tokens is 12288" in error and "set learner.recompute" in error


def test_published_parameter_counts():
    for name, expected in (("1.7b", 1.72e9), ("4b", 4.02e9), ("8b", 8.19e9)):
        size = size_of(blueprint(qwen3(name), LearnerConfig(), "bfloat16"))
        assert size.parameters == size.trained == pytest.approx(expected, rel=2e-3)
        assert size.root + size.layers * size.layer == size.parameters
        assert size.kv_bytes("bfloat16") == 2 * size.layers * 8 * 128 * 2


@pytest.mark.parametrize(("words", "parts"), [
    (["learner.ranks=1"], ["field learner.ranks is 1: weights, gradients and moments of a rank are 131.05 GB and it has 80.00 GB", "lora_rank"]),
    (["learner.micro_batch_tokens=200000"],
     ["field learner.micro_batch_tokens is 200000", "has 80.00 GB; lower it, raise learner.ranks or set learner.lora_rank"]),
    (["--gpu-memory", "19"], ["field generators.gpu_memory_utilization is 0.85: the weights are 16.38 GB and its share of a GPU is 16.15 GB"]),
    (["generators.gpu_memory_utilization=0.21"], ["field generators.gpu_memory_utilization is 0.21: the key-value cache holds 2,838 tokens; expected "
                                                  "at least one sequence of generators.max_model_len (12288), 1,728 MiB"]),
    (["generators.kv_cache_mb=1727"], ["field generators.kv_cache_mb is 1727", "1,728 MiB"]),
    (["generators.kv_cache_mb=60000"], ["field generators.kv_cache_mb is 60000: with 16.38 GB of weights it exceeds its share of a GPU, 68.00 GB"]),
    (["generators.min=5"], ["field learner.ranks is 4 (x 4 CPUs, 1 GPUs) and generators.min is 5", "1 of them find no place on 1 node of"]),
    (["--cpus-per-node", "32"], ["with 1 CPU for Ray Data, 1 of them find no place on 1 node of 32 CPUs and 8 GPUs of 80.00 GB"]),
    (["generators.gpus=0.5"], ["field generators.gpu_memory_utilization is 0.85; expected at most generators.gpus (0.5)"]),
    (["generators.max_model_len=50000", "learner.micro_batch_tokens=50000"],
     ["field generators.max_model_len is 50000; expected at most the model's 40960 positions"]),
    (["learner.lora_rank=8", "learner.lora_targets=qkv"], ["field learner.lora_targets is 'qkv': the model has no linear layer 'qkv'"]),
])
def test_what_cannot_fit_is_refused_naming_the_field(capsys, models, words, parts):
    code, said, error = run(capsys, "--config", CONF / "qwen3-8b.yaml", "--nodes", 1, f"model.path={models / '8b'}", *words)
    assert code == 2 and "it fits" not in said
    assert error.startswith("rtpo: configuration error: ")
    assert [part for part in parts if part not in error] == [], error


def test_more_nodes_hold_more_and_an_autoscaling_cluster_may_grow(capsys, models):
    base = ["--config", CONF / "qwen3-1.7b.yaml", f"model.path={models / '1.7b'}", "generators.min=12"]
    assert run(capsys, *base, "--nodes", 1)[0] == 2
    code, said, _ = run(capsys, *base, "--nodes", 2)
    assert code == 0 and "node 0: ranks 4, generators 4" in said and "node 1: ranks 0, generators 8" in said
    code, said, _ = run(capsys, *base, "--nodes", 1, "cluster.autoscaling=true", "generators.resource=sampler")
    assert code == 0 and "8 of them have to wait for nodes that the cluster adds" in said
    assert "generators 12: each 4 CPUs, 1 GPUs and 1 of the resource sampler" in said


def test_lora_says_what_it_saves(capsys, models):
    base = ["--config", CONF / "qwen3-8b.yaml", f"model.path={models / '8b'}", "--nodes", 1, "learner.ranks=1", "learner.lora_rank=16"]
    code, said, _ = run(capsys, *base)
    assert code == 0 and "43.65 M of adapters are trained" in said  # 36 layers x 16 x (in + out of seven linear layers)
    assert "LoRA of rank 16: 33.46 GB of weights, gradients and moments instead of 131.05 GB" in said
    assert "a weight push: 16.38 GB" in said
    assert "reference" not in run(capsys, *base, "algorithm.args.kl_coef=0.1")[1]
    assert "reference 8.19 GB" in run(capsys, *base, "algorithm.args.kl_coef=0.1", "learner.lora_rank=0", "learner.ranks=4")[1]


# --- this machine, and the tiny model


def test_the_quickstart_here_builds_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "materialise", lambda *_: pytest.fail("the tiny model was built"))
    words = ["--config", CONF / "quickstart.yaml", "cluster.local_cpus=2", f"run.root={tmp_path}", f"warm_start.cache={tmp_path}"]
    code, said, error = run(capsys, *words)
    assert (code, error, list(tmp_path.iterdir())) == (0, "", [])
    assert "model tiny, from warm_start (at most): 0.62 M parameters" in said
    assert "trunks           64 rollouts          6,144 tokens" in said
    for turn, tokens in ((2, "16,384"), (1, "32,768"), (0, "49,152")):
        assert re.search(rf"turn {turn} +512 siblings +{tokens} tokens, 1 optimizer step, weights pushed", said)
    assert "64 tasks of 3 turns, 104,448 tokens, 3 optimizer steps" in said
    assert "1,024 bytes a token, 65,536 tokens: 409 sequences" in said
    code, _, error = run(capsys, *words, "cluster.local_cpus=1")
    assert code == 2 and "find no place on 1 node of 1 CPUs and 0 GPUs" in error
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"total": 3e8}))
    code, _, error = run(capsys, *words)
    assert code == 2 and "learner ranks and generators need" in error and "of the node's 300.0 MB" in error


def test_the_tiny_models_size_is_that_of_the_built_one():
    config = load_config(CONF / "quickstart.yaml", ["cluster.local_cpus=2"])
    tokenizer = tiny.build_tokenizer(config)
    built = tiny.build_model(config, tokenizer)
    size, most = (size_of(blueprint(tiny.shape(config, words), config.learner, "float32")) for words in (len(tokenizer), config.warm_start.vocab))
    assert size.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert size.parameters <= most.parameters


def test_nodes_are_described_with_a_dry_run_only(capsys):
    assert cli.main(["train", "--nodes", "2", "--gpu-memory", "40"]) == 2
    assert "--nodes, --gpu-memory without --dry-run" in capsys.readouterr().err
    config = load_config(None, ["cluster.address=x"])
    nodes = nodes_of(config, nodes=2, gpus_per_node=None, gpu_memory=None, cpus_per_node=None)
    assert (nodes.count, nodes.gpus, nodes.gpu_memory, nodes.cpus) == (2, 8, 80e9, 0)
    for name in ("nodes", "gpu_memory", "cpus_per_node"):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 0; expected more than 0"):
            nodes_of(config, **{**dict.fromkeys(("nodes", "gpus_per_node", "gpu_memory", "cpus_per_node")), name: 0})


# --- what a sweep samples


@pytest.mark.parametrize(("words", "rows"), [
    (["algorithm.name=grpo", "algorithm.args.n_trunks=8"], ["trunks 512 rollouts 49,152 tokens", "all turns 0 siblings 0 tokens, 1 optimizer step,"]),
    (["algorithm.name=seeupo", "algorithm.args.n_trunks=8"], ["all turns 0 siblings 0 tokens, 3 optimizer steps"]),
    (["algorithm.name=treegrpo", "algorithm.args.n_branches=3"], ["trunks 256 rollouts", "all turns 768 siblings"]),
    (["algorithm.name=arpo"], ["trunks 512 rollouts", "all turns 512 siblings"]),
    (["algorithm.name=refuel"], ["trunks 256 rollouts", "all turns 256 siblings"]),
    (["algorithm.args.reuse_trunk_at_last_turn=true"], ["turn 2 448 siblings", "turn 1 512 siblings"]),
    (["environment.context=summary"], ["trunks 64 rollouts 12,288 tokens"]),
    (["generators.max_model_len=80"], ["trunks 64 rollouts 5,120 tokens"]),
    (["algorithm.args.epochs=2", "algorithm.args.minibatches=4"], ["8 optimizer steps, weights pushed"]),
    (["algorithm.args.sync_every=0"], ["turn 0 512 siblings 49,152 tokens, 1 optimizer step\n", " 1 a sweep"]),
])
def test_rollouts_of_a_sweep(capsys, words, rows):
    code, said, error = run(capsys, "--config", CONF / "quickstart.yaml", "cluster.local_cpus=2", *words)
    assert code == 0, error
    said = re.sub(" +", " ", said)
    assert [row for row in rows if row not in said] == [], said


def test_siblings_of_a_method_that_branches_its_own_way():
    class Twice(Algorithm):
        branching = True

        def branches(self, stage, trunks, rng):
            from rtpo_ray.algorithms.base import Branch
            return [Branch(index, boundary.turn, 2) for index, trunk in enumerate(trunks) for boundary in trunk.boundaries[1:]]

    assert _starts(Twice(n_trunks=3), Stage(), 4) == {1: 6, 2: 6, 3: 6}
    assert [len(trunk.boundaries) for trunk in _full_trunks(3, 4)] == [4, 4, 4]


# --- the memory model


def measured(rank, world, path, tokens, vocabulary, config, dtype, siblings=1, logits_bytes=modeling.LOGITS_BYTES):
    """Largest number of bytes in tensors during the second update of two micro-batches, by the profiler's record of allocations."""
    modeling.LOGITS_BYTES = logits_bytes
    rng, samples = random.Random(0), []
    for number in range(32 * siblings * world):
        if number % siblings == 0:
            context = [rng.randrange(vocabulary) for _ in range(tokens // 32)]
        response = [rng.randrange(vocabulary) for _ in range(tokens // 32 // siblings)]
        samples.append(Sample(sample_id=f"{number:03d}", context_ids=context, context_hash=context_hash(context), response_ids=response,
                              engine_logprobs=[-6.0] * len(response), advantage=rng.uniform(-1, 1), weight=0.5,
                              group_id=str(number // siblings)))
    gc.collect()
    trace = folder() / f"trace-{rank}.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        learner = Learner(path, learner_config(**config, micro_batch_tokens=tokens, lr=1e-3, eps=1e-8), objective=Objective(), dtype=dtype,
                          temperature=1.0, device="cpu")
        for seed in range(2):
            with record_function(f"update {seed}"):
                learner.update(samples[rank * len(samples) // world:][:32 * siblings], 4, len(samples), seed)
    modeling.LOGITS_BYTES = 256 * 2**20
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    (start,) = [event["ts"] for event in events if event.get("name") == "update 1" and event["ph"] == "X" and event["cat"] == "user_annotation"]
    memory = sorted((event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return max(total for at, total, _ in memory if at >= start) - (memory[0][1] - memory[0][2])


@pytest.mark.parametrize(("world", "dtype", "changes", "siblings", "chunk"), [
    (1, "float32", {}, 1, 512), (1, "float32", {"recompute": True}, 1, 512), (1, "bfloat16", {"lora_rank": 8}, 1, 512), (2, "float32", {}, 1, 512),
    (2, "bfloat16", {"recompute": True, "lora_rank": 8}, 1, 512), (1, "float32", {}, 8, 64)], ids=str)
def test_memory_of_a_training_step_is_as_computed(monkeypatch, world, dtype, changes, siblings, chunk):
    """`chunk`: positions of which there are logits at once."""
    config, tokens = Qwen3Config(**SMALL), 1024
    path = str(folder() / "measured")
    if not Path(path).is_dir():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    learner = LearnerConfig(**changes)
    logits_bytes = 4 * SMALL["vocab_size"] * chunk
    monkeypatch.setattr(memory, "LOGITS_BYTES", logits_bytes)
    lm = blueprint(config, learner, dtype)
    computed = sum(rank_memory(size_of(lm), activations_of(lm, tokens), ranks=world, dtype=dtype, scored=tokens // 2, recompute=learner.recompute,
                               reference=False).values())
    found = max(run_ranks(world, measured, path, tokens, SMALL["vocab_size"], changes, dtype, siblings, logits_bytes))
    print(f"{world} ranks, {dtype}, {changes}: computed {computed / 1e6:.1f} MB, measured {found / 1e6:.1f} MB, ratio {computed / found:.3f}")
    assert 0.9 < computed / found < 1.1


def test_activations_grow_with_the_tokens_never_with_their_square():
    lm = blueprint(Qwen3Config(**SMALL), LearnerConfig(), "bfloat16")
    short, long = (activations_of(lm, tokens) for tokens in (512, 4096))
    assert long.layers == pytest.approx(8 * short.layers, rel=0.01)
    assert long.inputs == 3 * 4096 * 128 * 2  # a layer's input is kept by itself
    assert long.layer < long.layers / 2.5


def test_other_families_are_counted_too():
    config = Gemma2Config(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                          head_dim=16)
    size = size_of(blueprint(config, LearnerConfig(lora_rank=2, lora_targets="q_proj"), "float32"))
    lm = AutoModelForCausalLM.from_config(config)
    assert size.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert size.trained == size.held - size.parameters == 2 * 2 * (32 + 32)
    assert activations_of(blueprint(config, LearnerConfig(), "float32"), 64).layers > 2 * 64 * 32 * 4


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b"])
@pytest.mark.parametrize("task", ["math", "hard_search", "bfcl", "appworld"])
def test_what_is_trained_on_fits_every_shipped_machine(capsys, models, task, size):
    code, said, error = run(capsys, "--config", CONF / f"qwen3-{size}.yaml", "--config", CONF / "benchmarks" / f"{task}.yaml",
                            f"model.path={models / size}", "--nodes", 1)
    assert code == 0 and said.rstrip().endswith("it fits"), error
    assert "a sweep of rtpo, at the most: " in said
