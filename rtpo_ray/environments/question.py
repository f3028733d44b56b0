"""A question out of a file, tools to find the answer with, and a grader for it: mathematics, question answering, search.

    environment:
      name: question
      args: {tools: [python], grader: math, prompt: "{question}\\n\\nPut the final answer in \\\\boxed{{}}."}
    data: {train: train.jsonl, fields: {question: problem}}
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from rtpo_ray import rewards
from rtpo_ray.environments.base import Observation, Step, ToolEnvironment
from rtpo_ray.tools import build as build_toolset

Spec = str | dict[str, dict[str, Any]]  # a name, or {name: options}


class Question(ToolEnvironment):
    """Args:
    grader: how an answer is judged: a name of `rewards.GRADERS`, or {name: options}.
    tools: names of `tools.TOOLSETS`, or {name: options}, in a list.
    prompt: the first message, with the row's fields in braces.
    system: the system message; empty for none.
    examples: messages that stand before the question, such as a solved one, each {role: text} with a role of user, assistant or tool.
    """

    def __init__(self, grader: Spec = "math", tools: Sequence[Spec] = (), prompt: str = "{question}", system: str = "",
                 examples: Sequence[dict[str, str]] = ()) -> None:
        self._grader = rewards.build(grader)
        for name, value in (("tools", tools), ("examples", examples)):
            if isinstance(value, str):
                raise ValueError(f"{name} is {value!r}; expected a list")
        super().__init__([build_toolset(spec) for spec in tools])
        self.prompt, self.system = prompt, system
        asked = dict.fromkeys(field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None)
        if not asked or not all(field.isidentifier() for field in asked):
            raise ValueError(f"prompt is {prompt!r}; expected fields of the row in braces, such as {{question}}, and other braces doubled")
        self.fields = tuple(dict.fromkeys([*asked, *self._grader.fields]))
        self.examples = tuple(_message(one) for one in examples)
        self.unsaved = ("longest_wait", "fields", "prompt", "system", "examples", "_grader")  # the same in every episode
        self.longest_wait = max(self.longest_wait, self._grader.longest_wait)
        self.instant = self._grader.instant and all(toolset.instant for toolset in self.toolsets)
        self.replay = any(toolset.replay for toolset in self.toolsets)

    def reset(self, seed: int) -> Observation:
        return Observation(self.prompt.format(**self.row), before=self.examples)

    def answer(self, text: str) -> Step:
        return Step(reward=self._grader.grade(text, self.row), terminated=True)


def _message(example: Any) -> tuple[str, str]:
    if not isinstance(example, dict) or len(example) != 1 or not set(example) <= {"user", "assistant", "tool"}:
        raise ValueError(f"examples hold {example!r}; expected messages such as {{user: text}}, {{assistant: text}} or {{tool: text}}")
    ((role, text),) = example.items()
    return role, str(text)
