"""Chat templates of four families on a small byte-level BPE tokenizer, for tests of token identity."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rtpo_ray.episodes.contexts import ChatTemplate

CHATML = """\
{%- if tools %}<|im_start|>system:
{%- for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Llama 3: header tokens, every content trimmed, the tool's result under "ipython".
LLAMA = """\
<|begin_of_text|>
{%- for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# Mistral: no header before an assistant message, so a generation prompt is empty.
MISTRAL = """\
<s>
{%- for message in messages %}
{%- if message.role == 'assistant' %} {{ message.content }}</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- else %}[INST] {{ message.content }}[/INST]
{%- endif %}
{%- endfor %}"""

# Qwen3: thoughts before the last question are dropped, a last reply without any gets an empty one, a tool's result is a user message.
QWEN3 = """\
{%- set last = namespace(question=messages | length - 1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}
{%- set thought = '' %}{% set content = message.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > last.question and (loop.last or thought) %}<|im_start|>assistant
<think>
{{ thought.strip('\\n') }}
</think>

{{ content }}<|im_end|>
{% else %}<|im_start|>assistant
{{ content }}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "llama": (LLAMA, "<|eot_id|>"), "mistral": (MISTRAL, "</s>"), "qwen3": (QWEN3, "<|im_end|>")}

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>",
           "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<tool_call>", "</tool_call>", "<think>", "</think>")


@functools.cache
def chat(family: str) -> ChatTemplate:
    """The template of a family on a tokenizer with its end-of-turn token."""
    template, eos = TEMPLATES[family]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    raw.train_from_iterator(["user assistant system question answer say the word hello world boss friend\n\n"] * 9, trainer)
    return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, chat_template=template))
