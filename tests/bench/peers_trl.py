"""TRL's side of peers.py: GRPOTrainer on CPUs, in a virtual environment of its own that has TRL and this project's folder on its path.

    python tests/bench/peers_trl.py SETTINGS.json

SETTINGS.json: model (folder), rows (file of prompts, each with the seed of its task), environment (arguments), turns, groups, group (completions a
prompt), tokens (longest response), micro (completions of one pass), threads, continuous (transformers' continuous batching), temperature, and the
optimizer's lr, weight_decay, beta1, beta2, eps, max_grad_norm. Prompts, tasks and grading are this project's own. A step is an optimizer step.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))

from onecall import OneCall  # noqa: E402
from sides import answers, requests  # noqa: E402

from rtpo_ray.environments.lookup import Lookup  # noqa: E402

# How TRL is told what a call of a tool looks like in this model's language, and its language how to say one again.
CALLS = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": {
    "tool_calls": {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
                   "transform": {"type": "function", "function": "{content}"}},
    "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}}
SAID = ("message.content + '<|im_end|>\\n'", "(message.content or '') + (('<tool_call>' + (message.tool_calls[0].function | tojson) + "
        "'</tool_call>') if message.tool_calls else '') + '<|im_end|>\\n'")


class Steps(TrainerCallback):
    """Lets the trainer go on for as many steps as are asked for."""

    def __init__(self) -> None:
        self._asked = requests()
        self._left = self._count = 0
        self._started = 0.0
        self.done: list[dict[str, Any]] = []

    def wait(self) -> bool:
        """Until the next steps are asked for; whether any are."""
        for count in self._asked:
            self._left, self._count, self.done, self._started = count, count, [], time.perf_counter()
            return True
        return False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = not self.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._left -= 1
        if not self._left:
            print(answers(self._count, time.perf_counter() - self._started, self.done), flush=True)
            control.should_training_stop = not self.wait()


class Hops:
    """A Lookup as TRL wants its environments: public methods are tools."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._lookup = Lookup(**arguments)

    def reset(self, seed: int, **row: Any) -> None:
        """The question is in the prompt already."""
        self._lookup.reset(seed)

    def lookup(self, entity: str, relation: str) -> str:
        """Look one fact up.

        Args:
            entity: whose
            relation: which
        """
        return self._lookup.lookup(entity, relation)

    def _grade(self, text: str) -> float:
        return self._lookup.answer(text.strip()).reward


class Peer:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.steps = settings, Steps()
        torch.set_num_threads(settings["threads"])
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        rows = json.loads(Path(settings["rows"]).read_text())
        several = settings["turns"] > 1
        if several:
            self.tokenizer.response_template = CALLS
            self.tokenizer.chat_template = self.tokenizer.chat_template.replace(*SAID)
        else:
            for row in rows:
                found = self.tokenizer(text=row["prompt"])["input_ids"]
                if found != row["ids"]:
                    raise ValueError(f"the prompt of seed {row['seed']} has tokens {found}; expected those of our context, {row['ids']}")
        self.trainer = GRPOTrainer(
            model=settings["model"], processing_class=self.tokenizer, args=self.arguments(), callbacks=[self.steps],
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "seed": row["seed"]} for row in rows]),
            reward_funcs=self.grade_hops if several else self.grade,
            environment_factory=(lambda: Hops(settings["environment"])) if several else None)

    def arguments(self) -> GRPOConfig:
        """What makes it fastest: wide batches, no logging, no saving, no entropy bonus, no reference model."""
        of = self.settings
        completions = of["groups"] * of["group"]
        passes = completions // of["micro"]
        return GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="peer-"), use_cpu=True, bf16=False, seed=0, beta=0.0, num_iterations=1, loss_type="grpo",
            per_device_train_batch_size=of["micro"], gradient_accumulation_steps=passes, steps_per_generation=passes,
            num_generations=of["group"], max_completion_length=of["tokens"], temperature=of["temperature"],
            gradient_checkpointing=False, max_steps=1_000_000, shuffle_dataset=False, max_tool_calling_iterations=max(of["turns"] - 1, 1),
            use_transformers_continuous_batching=of["continuous"],
            learning_rate=of["lr"], lr_scheduler_type="constant", weight_decay=of["weight_decay"], adam_beta1=of["beta1"], adam_beta2=of["beta2"],
            adam_epsilon=of["eps"], max_grad_norm=of["max_grad_norm"], optim="adamw_torch",
            logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True, dataloader_num_workers=0,
            dataloader_pin_memory=False)

    def grade(self, completion_ids: list[list[int]], seed: list[int], **others: Any) -> list[float]:
        """As our environment grades the same tokens."""
        rewards = []
        for ids, number in zip(completion_ids, seed, strict=True):
            environment = OneCall(**self.settings["environment"])
            environment.reset(number)
            whole = ids[:-1] if ids[-1] == self.tokenizer.eos_token_id else ids
            rewards.append(environment.step(self.tokenizer.decode(whole, skip_special_tokens=False)).reward)
        self.note(sum(map(len, completion_ids)), rewards)
        return rewards

    def grade_hops(self, completions: list[list[dict[str, Any]]], completion_ids: list[list[int]], environments: list[Hops],
                   **others: Any) -> list[float]:
        """1 for the right answer as the last message."""
        rewards = [environment._grade(said[-1]["content"] if said[-1]["role"] == "assistant" and not said[-1].get("tool_calls") else "")
                   for said, environment in zip(completions, environments, strict=True)]
        observed = [self.length(message["content"]) for said in completions for message in said if message["role"] == "tool"]
        self.note(sum(map(len, completion_ids)) - sum(observed), rewards)
        return rewards

    @functools.cache  # noqa: B019 - lives as long as the process
    def length(self, observation: str) -> int:
        """Tokens that an observation and the messages around it add to a context."""
        return len(self.trainer._get_tool_suffix_ids([{"role": "tool", "name": "lookup", "content": observation}]))

    def note(self, tokens: int, rewards: list[float]) -> None:
        self.steps.done.append({"generated_tokens": tokens, "success": sum(rewards) / len(rewards)})


if __name__ == "__main__":
    Peer(json.loads(Path(sys.argv[1]).read_text())).trainer.train()
