"""A model in a GGUF file becomes an ordinary folder, once."""

import numpy as np
import pytest

from rtpo_ray.errors import ConfigError
from rtpo_ray.policy.gguf import convert

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *[chr(code) for code in range(33, 127)], "\u0120", "\u010a", "ab"]
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write(path, rng):
    """A random Llama of two layers; returns its tensors by their names in the file."""
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        own = {"attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH),
               "ffn_norm": (WIDTH,), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_weights_tokenizer_and_template_are_those_of_the_file(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rtpo_ray.episodes.contexts import ChatTemplate

    file, said = tmp_path / "small.gguf", []
    tensors = write(file, np.random.default_rng(1))
    folder = convert(file, tmp_path / "cache", said.append)
    assert folder == convert(file, tmp_path / "cache", said.append) and len(said) == 1
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for theirs, ours in {"token_embd": "model.embed_tokens", "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
                         "blk.0.attn_v": "model.layers.0.self_attn.v_proj", "output_norm": "model.norm"}.items():
        assert np.array_equal(state[f"{ours}.weight"].numpy(), tensors[f"{theirs}.weight"]), ours
    template = ChatTemplate(AutoTokenizer.from_pretrained(folder))
    assert template.encode("cab<|im_end|>") == [TOKENS.index("c"), TOKENS.index("ab"), 2]
    assert 2 in template.stop_ids
    file.touch()  # another file of that name
    assert convert(file, tmp_path / "cache", said.append) != folder


def test_what_is_no_model_is_refused_and_leaves_nothing(tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match=r"field model\.path is '.*bad\.gguf': no model could be read from it"):
        convert(file, tmp_path / "cache", print)
    assert list((tmp_path / "cache").iterdir()) == []
