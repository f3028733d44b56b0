"""psi, the context builder: from what has happened to c_k, the exact token ids that the model sees at turn k.

    builder = Append(template); builder.start(system, tools, first); builder.context()  -> c_0
    builder.extend(response_ids, observation);                       builder.context()  -> c_1

A builder that keeps summaries wants one between the two: `summary_request()` is the context to sample it in, `summarise(ids)` takes it.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from rtpo_ray.environments.base import Observation

SUMMARY_REQUEST = "Sum up this turn in one sentence: what you did and what you learned."
SUMMARIES = "Turns so far:"  # heads the list of summaries in the first message


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token: str
    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool = ..., verbose: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class ChatTemplate:
    """A tokenizer's chat template, rendered as text and encoded once.

    Raises ValueError when the tokenizer's end-of-text token is not what ends an assistant message: responses would not stop there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._delta = functools.lru_cache(maxsize=4096)(self._make_delta)
        reply = self.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": "assistant-reply"}], [], prompt=False)
        after = reply.rpartition("assistant-reply")[2]
        if not tokenizer.eos_token or not after.startswith(tokenizer.eos_token):
            raise ValueError(f"the tokenizer's eos_token is {tokenizer.eos_token!r}, but its chat template ends an assistant message "
                             f"with {after[:20]!r}; set eos_token to what ends a message")

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False)
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def response_text(self, response_ids: Sequence[int]) -> str:
        """The response as the environment reads it: without the end-of-turn token."""
        ids = list(response_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def delta(self, observation: Observation, *, closed: bool) -> list[int]:
        """Tokens between a response and the next one: the rest of the closed assistant message, the observation, the prompt.

        Found by rendering a dummy conversation with and without the observation, so that any template whose earlier messages
        are stable works. Raises ValueError for one that rewrites them: use `environment.context=template` there. A reply with a
        thought is tried too: Qwen3 puts an empty one before a last reply without any, and keeps a real one while tools answer.
        """
        return self._delta(observation, closed)

    def _make_delta(self, observation: Observation, closed: bool) -> list[int]:
        marker, eos = "assistant-reply", self.tokenizer.eos_token
        for reply in (marker, f"<think>\nthought\n</think>\n\n{marker}"):
            before: list[dict[str, Any]] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": reply}]
            after = [*before, {"role": observation.role, "content": observation.text}]
            head, full = self.render(before, [], prompt=False), self.render(after, [], prompt=True)
            stable = head[: head.rindex(marker) + len(marker)]
            if full.startswith(head) and full[len(stable):].startswith(eos):
                return self.encode(full[len(stable) + (len(eos) if closed else 0):])
        raise ValueError(f"the chat template rewrites an earlier message when a {observation.role!r} message follows, or does not end it "
                         f"with {eos!r}; set environment.context=template, environment.train_context=recorded")


class ContextBuilder(ABC):
    """From what has happened to c_k. `snapshot` and `restore` cover everything that `start` and later calls set."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @abstractmethod
    def start(self, system: str, tools: list[dict[str, Any]], first: Observation) -> None:
        """Forget what was, and open an episode."""

    @abstractmethod
    def context(self) -> list[int]:
        """c_k [C], the token ids that the model sees next."""

    @abstractmethod
    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        """Take the turn that was just played: l_k [T] and f_k."""

    @abstractmethod
    def snapshot(self) -> Any:
        """The whole state, to be pickled; later calls do not change it."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Take back a state that `snapshot` made; the snapshot can be restored many times."""

    def summary_request(self) -> list[int] | None:
        """The context [C] in which the model sums the last turn up; None when no summary is wanted."""
        return None

    def summarise(self, response_ids: Sequence[int]) -> None:
        """Take the summary [T] that was asked for. Raises TypeError where `summary_request` is always None."""
        raise TypeError(f"{type(self).__name__} keeps no summaries")


class Append(ContextBuilder):
    """c_{k+1} = c_k + l_k + the tokens of f_k: what was sampled stays as it was sampled."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template)
        self._ids: list[int] = []

    def start(self, system: str, tools: list[dict[str, Any]], first: Observation) -> None:
        self._ids = self._template.encode(self._template.render(_opening(system, first), tools, prompt=True))

    def context(self) -> list[int]:
        return list(self._ids)

    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        closed = response_ids[-1] == self._template.tokenizer.eos_token_id
        self._ids += [*response_ids, *self._template.delta(observation, closed=closed)]

    def snapshot(self) -> Any:
        return list(self._ids)

    def restore(self, snapshot: Any) -> None:
        self._ids = list(snapshot)


class Template(ContextBuilder):
    """c_k is the whole chat rendered anew, so a template may drop or rewrite what came before (Qwen3 drops earlier thoughts)."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template)
        self._opening: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []  # two messages a turn: response, observation
        self._tools: list[dict[str, Any]] = []

    def start(self, system: str, tools: list[dict[str, Any]], first: Observation) -> None:
        self._opening, self._turns, self._tools = _opening(system, first), [], tools

    def context(self) -> list[int]:
        return self._render(self._messages())

    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        self._turns.append({"role": "assistant", "content": self._template.response_text(response_ids)})
        self._turns.append({"role": observation.role, "content": observation.text})

    def snapshot(self) -> Any:
        return copy.deepcopy((self._opening, self._turns, self._tools))

    def restore(self, snapshot: Any) -> None:
        self._opening, self._turns, self._tools = copy.deepcopy(snapshot)

    def _messages(self) -> list[dict[str, Any]]:
        return [*self._opening, *self._turns]

    def _render(self, messages: list[dict[str, Any]]) -> list[int]:
        return self._template.encode(self._template.render(messages, self._tools, prompt=True))


class Window(Template):
    """c_k is the opening and the last `window` turns, rendered anew. Raises ValueError when `window` is below 1."""

    def __init__(self, template: ChatTemplate, window: int) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; expected at least 1")
        super().__init__(template)
        self._window = window

    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        super().extend(response_ids, observation)
        del self._turns[: -2 * self._window]


class Summary(Template):
    """c_k is the opening and the model's own summaries of turns 0..k-1, listed at the end of the opening's last message.

    No message of its own, so that user and assistant alternate as some templates demand. Until a turn is summed up it stays raw.
    """

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template)
        self._summaries: list[str] = []

    def start(self, system: str, tools: list[dict[str, Any]], first: Observation) -> None:
        super().start(system, tools, first)
        self._summaries = []

    def summary_request(self) -> list[int] | None:
        return self._render(_say(self._messages(), SUMMARY_REQUEST)) if self._turns else None

    def summarise(self, response_ids: Sequence[int]) -> None:
        """Keep the summary on one line and without its thought: chat templates drop thoughts from assistant messages only."""
        text = self._template.response_text(response_ids).rpartition("</think>")[2]
        self._summaries.append(" ".join(text.split()))
        self._turns = []

    def snapshot(self) -> Any:
        return super().snapshot(), list(self._summaries)

    def restore(self, snapshot: Any) -> None:
        chat, summaries = snapshot
        super().restore(chat)
        self._summaries = list(summaries)

    def _messages(self) -> list[dict[str, Any]]:
        if not self._summaries:
            return super()._messages()
        return [*_say(self._opening, "\n- ".join([SUMMARIES, *self._summaries])), *self._turns]


BUILDERS: dict[str, type[ContextBuilder]] = {"append": Append, "template": Template, "window": Window, "summary": Summary}


def build_context(name: str, template: ChatTemplate, window: int) -> ContextBuilder:
    """The builder of that name; `window` counts for "window" alone. Raises ValueError for a window below 1."""
    builder = BUILDERS[name]
    return builder(template, window) if issubclass(builder, Window) else builder(template)


def _opening(system: str, first: Observation) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": first.role, "content": first.text}]


def _say(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` said by the user at the end: inside the last message where that is the user's, else as a new one."""
    last = messages[-1]
    if last["role"] == "user":
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
