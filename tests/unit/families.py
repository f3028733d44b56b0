"""Chat templates of real models, from the package trl where it is installed, on a small byte-level tokenizer with each family's special tokens,
and an environment to play on them."""

import functools
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rtpo_ray.environments.base import Observation, Step, ToolEnvironment, tool
from rtpo_ray.episodes.contexts import ChatTemplate

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
DEEPSEEK = tuple(f"<｜{name}｜>" for name in (
    "begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end",
    "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"))
HARMONY = tuple(f"<|{name}|>" for name in ("startoftext", "endoftext", "start", "message", "channel", "constrain", "end", "call", "return"))
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>", "<tool_call>",
       "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


# No package here brings one of Mistral's. As strict as those: a result needs a call before it, and an id of nine characters on both.
MISTRAL = """\
<s>
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not loop.previtem.tool_calls or message.tool_call_id | length != 9 %}{{ raise_exception('no call before, or no id') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ '' if loop.last else ', ' }}{% endfor %}]</s>
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- else %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    file: str  # in trl/chat_templates; empty: one of ours
    calls: str  # the format that is recognised
    special: tuple[str, ...]
    stops: tuple[str, ...]  # what ends a response
    eos: str = "<|im_end|>"  # the tokenizer's
    bos: str | None = None
    args: dict = field(default_factory=dict)
    tools_in: str = "template"
    user_ok: bool = True  # whether a user message may follow in context=append


FAMILIES = {
    "qwen2_5": Family("qwen2_5", "hermes", CHATML, ("<|im_end|>",)),
    "qwen3": Family("qwen3", "hermes", CHATML, ("<|im_end|>",), user_ok=False),
    "qwen3-nothink": Family("qwen3", "hermes", CHATML, ("<|im_end|>",), args={"enable_thinking": False}, user_ok=False),
    "qwen3-2507": Family("qwen3_instruct_2507", "hermes", CHATML, ("<|im_end|>",)),
    "qwen3.5-think": Family("qwen3_5_think", "qwen3_coder", CHATML, ("<|im_end|>",), user_ok=False),
    "qwen3.5-nothink": Family("qwen3_5_nothink", "qwen3_coder", CHATML, ("<|im_end|>",), user_ok=False),
    "llama3": Family("llama3", "hermes", LLAMA, ("<|eot_id|>", "<|end_of_text|>"), "<|end_of_text|>", "<|begin_of_text|>", tools_in="system"),
    "llama3.1": Family("llama3_1", "llama3", LLAMA, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "<|end_of_text|>", "<|begin_of_text|>"),
    "gptoss": Family("gptoss", "harmony", HARMONY, ("<|return|>", "<|call|>"), "<|return|>", "<|startoftext|>"),
    "deepseekv3": Family("deepseekv3", "deepseek", DEEPSEEK, ("<｜end▁of▁sentence｜>",), "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>",
                         tools_in="system"),
    "glm4moe": Family("glm4moe", "glm", GLM, ("<|user|>", "<|observation|>", "<|endoftext|>"), "<|endoftext|>"),
    "gemma3": Family("gemma3", "hermes", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>"), "<eos>", "<bos>",
                     tools_in="system"),
    "phi3": Family("phi3", "hermes", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|end|>", "<|endoftext|>"),
                   "<|endoftext|>", tools_in="system"),
    "mistral": Family("", "mistral", ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                                      "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), ("</s>",), "</s>", "<s>"),
    "lfm2": Family("lfm2", "pythonic", ("<|startoftext|>", *CHATML, "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>",
                                        "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"), ("<|im_end|>",),
                   bos="<|startoftext|>"),
}


def template_text(file: str) -> str:
    """A chat template that trl brings. Skips the test where trl is absent."""
    if not file:
        return MISTRAL
    found = importlib.util.find_spec("trl")  # its files are read; it is never imported
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package trl is absent; its chat templates are what this test reads")
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{file}.jinja").read_text()


def small_tokenizer(special, eos, bos=None, template=None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges and these special tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400 + len(special), special_tokens=[AddedToken(token, normalized=False) for token in special],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    raw.train_from_iterator(["user assistant system question answer tool name arguments parameters result function\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, bos_token=bos, chat_template=template)


@functools.cache
def family_chat(name: str, **changes) -> ChatTemplate:
    """The template of a family of `FAMILIES`."""
    family = FAMILIES[name]
    tokenizer = small_tokenizer(family.special, family.eos, family.bos, template_text(family.file))
    return ChatTemplate(tokenizer, **{"args": family.args, "tools_in": family.tools_in, **changes})


class Desk(ToolEnvironment):
    """Two tools; an answer is met with another request until the fourth, so that every kind of response is followed by something."""

    instant = True
    system = "be brief"

    def __init__(self):
        super().__init__()
        self.total, self.answers = 0, []

    def reset(self, seed):
        self.total, self.answers = seed, []
        return Observation("question")

    @tool
    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: which
        """
        self.total += number
        return f"total {self.total}"

    @tool
    def note(self, text: str) -> str:
        """Keep a note.

        Args:
            text: which
        """
        return f"noted {text}"

    def answer(self, text):
        self.answers.append(text)
        if text == "done":
            return Step(reward=1.0, terminated=True)
        return Step(observation=Observation(f"go on {len(self.answers)}", "tool"))


def desk(template):
    made = Desk()
    made.calls = template.calls.name
    return made
