"""The tiny model: a small Qwen3 with its own tokenizer, warm-started on noisy demonstrations, saved as an ordinary Hugging Face folder.

`materialise(config)` builds it once for a set of options and returns the folder; nothing else knows that the model is tiny.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rtpo_ray import environments
from rtpo_ray.config import Config
from rtpo_ray.environments.base import Environment, Observation
from rtpo_ray.episodes.contexts import Append, ChatTemplate
from rtpo_ray.errors import ConfigError
from rtpo_ray.types import derive_seed

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# A JSON key with its punctuation is one piece, so that a tool call is 11 tokens; every other word is a piece of its own.
PIECES = r'["{},: ]*"?[a-z_]+": ["{\[]*| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+'

# ChatML as Qwen3 uses it: earlier thoughts are dropped, a tool's result is a user message. Tools are listed as signatures.
CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
  {{- '<|im_start|>system' -}}
  {%- if messages[0].role == 'system' -%}{{- '\\n' + messages[0].content -}}{%- endif -%}
  {%- for tool in tools or [] -%}
    {{- '\\n' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' and loop.index0 < last.question -%}
    {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' -}}
  {%- elif message.role != 'system' -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def materialise(config: Config, say: Callable[[str], None] = print) -> Path:
    """Folder of the tiny model for this config, built when it is not cached yet (a minute or two on two cores).

    Two processes that build the same model at once do no harm: each writes a folder of its own and the first rename wins.
    """
    recipe = (sys.modules[__name__], sys.modules[environments.find(config.environment).__module__])
    options: dict[str, Any] = {"warm_start": dataclasses.asdict(config.warm_start), "environment": dataclasses.asdict(config.environment),
                               "recipe": [inspect.getsource(module) for module in recipe]}
    del options["warm_start"]["cache"]
    options["environment"]["name"] = name = config.environment.path.rpartition(":")[2] or config.environment.name
    for unseen in ("path", "step_timeout", "context", "window", "train_context", "thoughts", "tools_in"):  # demonstrations do not depend on them
        del options["environment"][unseen]
    key = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = Path(config.warm_start.cache).expanduser() / f"tiny-{name}-{key}"
    if (folder / "config.json").is_file():
        return folder
    disable_progress_bar()
    say(f"building the tiny model: {config.warm_start.steps} supervised steps on noisy demonstrations -> {folder}")
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(config)
    model = build_model(config, tokenizer)
    loss = warm_start(model, tokenizer, config, say)
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    if (folder / "config.json").is_file():
        shutil.rmtree(scratch)  # another process was faster, with the same model
    else:
        shutil.rmtree(folder, ignore_errors=True)  # what a killed build left
        scratch.rename(folder)
    say(f"tiny model ready: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, last loss {loss:.3f}")
    return folder


def build_tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on demonstrations, so that any text can be encoded and the task's own words are short."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=config.warm_start.vocab, special_tokens=[AddedToken(t, normalized=False) for t in SPECIAL],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    texts = [text for index in range(500) for text in _transcript(config, index)]
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE)


def build_model(config: Config, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A random Qwen3 of the configured size."""
    torch.manual_seed(config.warm_start.seed)
    return Qwen3ForCausalLM(shape(config, len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def shape(config: Config, vocabulary: int, **tokens: int | None) -> Qwen3Config:
    """Of the model for a `vocabulary`, which is padded to a multiple of 64."""
    hidden = config.warm_start.hidden
    heads = hidden // 32
    return Qwen3Config(
        vocab_size=math.ceil(vocabulary / 64) * 64, hidden_size=hidden, intermediate_size=4 * hidden, head_dim=32,
        num_hidden_layers=config.warm_start.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, use_cache=True, **tokens)


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: Config, say: Callable[[str], None]) -> float:
    """Supervised training on the actions of noisy demonstrations; returns the last loss."""
    options = config.warm_start
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, betas=(0.9, 0.98))
    template = ChatTemplate(tokenizer)
    value = math.nan
    for step in range(options.steps):
        warm, left = min(1.0, (step + 1) / 50), 1 - step / options.steps
        optimizer.param_groups[0]["lr"] = options.lr * min(warm, 0.05 + 0.95 * left)
        noise = options.noise * min(1.0, 2 * step / options.steps)  # the skill first, then the habit of getting it wrong
        rows = [demonstration(config, template, step * options.batch + i, noise) for i in range(options.batch)]
        loss = _supervised_loss(model, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConfigError(f"field warm_start.lr is {options.lr}: the loss is {value} at supervised step {step}; lower it")
        if (step + 1) % 100 == 0:
            say(f"  warm start {step + 1}/{options.steps}: loss {value:.3f}")
    return value


def demonstration(config: Config, template: ChatTemplate, index: int, noise: float) -> tuple[list[int], list[bool]]:
    """One scripted episode laid out as a rollout would be: token ids [L] and which of them are actions [L]."""
    builder = Append(template)
    ids: list[int] = []
    mask: list[bool] = []
    response: list[int] = []
    for environment, observation, action in _script(config, index, noise):
        if not ids:
            builder.start(environment.system, environment.tools(), observation)
        else:
            builder.extend(response, observation)
        response = [*template.encode(action), template.tokenizer.eos_token_id]
        context = builder.context()
        mask += [False] * (len(context) - len(ids)) + [True] * len(response)
        ids = [*context, *response]
    return ids, mask


def _script(config: Config, index: int, noise: float) -> Iterator[tuple[Environment, Observation, str]]:
    """Turns of a noisy scripted episode: (environment, what it said, the action taken)."""
    rng = random.Random(derive_seed(config.warm_start.seed, "demonstration", index))
    environment = environments.build(config.environment)
    observation: Observation | None = environment.reset(rng.randrange(2**31))
    for _ in range(config.environment.max_turns):
        if observation is None:
            return
        action = environment.demonstrate(rng, noise)
        yield environment, observation, action
        observation = environment.step(action).observation


def _transcript(config: Config, index: int) -> list[str]:
    """The texts of one scripted episode, as the chat template lays them out."""
    parts: list[str] = []
    names: list[str] = []
    for environment, observation, action in _script(config, index, config.warm_start.noise):
        wrapped = f"<tool_response>{observation.text}</tool_response>" if observation.role == "tool" else observation.text
        parts += [f"user\n{wrapped}", f"assistant\n{action}"]
        names = [f"{tool['function']['name']}({', '.join(tool['function']['parameters']['properties'])})" for tool in environment.tools()]
    return ["system\n" + "\n".join(names), *parts]


def _supervised_loss(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Mean cross-entropy over the action tokens of right-padded rows."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), -100)
    for row, (ids, mask) in enumerate(rows):
        inputs[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
    hidden = model.model(inputs[:, :-1], use_cache=False).last_hidden_state
    wanted = targets[:, 1:]
    keep = wanted != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[keep]), wanted[keep])
