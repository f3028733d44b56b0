"""psi, the context builder: from what has happened to c_k, the exact token ids that the model sees at turn k.

    builder = Append(template); builder.start(system, tools, first); builder.context()  -> c_0
    builder.extend(response_ids, observation);                       builder.context()  -> c_1

A builder that keeps summaries wants one between the two: `summary_request()` is the context to sample it in, `summarise(ids)` takes it.
"""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rtpo_ray.environments.base import Observation
from rtpo_ray.episodes.toolcalls import FORMATS, StructuredFormat, describe_tools, recognise

if TYPE_CHECKING:
    from rtpo_ray.config import Config

SUMMARY_REQUEST = "Sum up this turn in one sentence: what you did and what you learned."
SUMMARIES = "Turns so far:"  # heads the list of summaries in the first message
_MARKER = "assistant-reply"  # of dummy conversations, which find out what a template does
_TODAY = datetime.datetime(2025, 1, 1)  # for templates that write the date: a context must be the same on every day
_QUESTION = {"role": "user", "content": "question"}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token: str
    eos_token_id: int
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = ..., verbose: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class ChatTemplate:
    """A tokenizer's chat template, rendered as text and encoded once, and how a model that speaks it calls tools.

    Args:
        calls: key of `toolcalls.FORMATS`; auto: recognised from the template's text.
        tools_in: "template": the template shows the tools; "system": the system message describes them.
        args: given to every rendering, such as {"enable_thinking": False}. The day that a template may ask for is 1 January 2025.
        stops: tokens that end a response besides those found here, such as a generation config lists.

    Attributes:
        calls: the format of tool calls.
        opens_thoughts: whether the prompt for a response may open a thought, so that the response begins inside it.
        stop_ids: tokens that end a response: what ends an assistant message, the end of text, what the format of calls adds.

    Raises ValueError when the template ends an assistant message with no token of its own: responses would not stop.
    """

    def __init__(self, tokenizer: Tokenizer, *, calls: str = "auto", tools_in: str = "template", args: Mapping[str, Any] | None = None,
                 stops: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.calls = FORMATS[recognise(str(tokenizer.chat_template)) if calls == "auto" else calls]
        self._tools_in, self._args = tools_in, {"strftime_now": _TODAY.strftime, **(args or {})}
        self._special = tokenizer.get_added_vocab()
        self._plain = re.compile(f"(?:(?!{'|'.join(map(re.escape, self._special))}).)*", re.DOTALL)  # text up to a special token
        self._delta = functools.lru_cache(maxsize=4096)(self._make_delta)
        self.stop_ids = self._find_stops(stops)
        self.opens_thoughts = self._in_thought(self.encode(self.render([_QUESTION], [], prompt=True)))
        self._shows_tool = self._shows("tool")

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False, **self._args)
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def opening(self, system: str, tools: list[dict[str, Any]], first: Observation) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The messages that an episode begins with, and the tools that the template is to show."""
        if self._tools_in == "system" and tools:
            system, tools = "\n\n".join(filter(None, (system, describe_tools(self.calls, tools)))), []
        said = [*([("system", system)] if system else []), *first.before, (first.role, first.text)]
        return [{"role": role, "content": text} for role, text in said], tools

    def turn(self, text: str, observation: Observation, *, strip: bool) -> list[dict[str, Any]]:
        """The messages that the response `text` and its observation become; where the template shows no tool's message, the user says it."""
        return self.calls.messages(text, self._role(observation), observation.text, strip=strip)

    def response_text(self, response_ids: Sequence[int], context: Sequence[int] = ()) -> str:
        """The response as the environment reads it: without the token that ended it, and begun with `<think>` where the `context` [C]
        that it answers has opened a thought."""
        ids = list(response_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return f"<think>{text}" if self.opens_thoughts and self._in_thought(context) else text

    def delta(self, response_ids: Sequence[int], observation: Observation) -> list[int]:
        """Tokens between a response and the next one: the rest of the closed assistant message, the observation, the prompt.

        The token that ended the response stands for the template's own end of the message, whichever it is. (GLM has none: there the
        token that begins the next message ends the response, and is written when another was sampled.) Found by rendering a
        dummy conversation with and without the observation, so that any template whose earlier messages are stable works. Raises
        ValueError for one that rewrites them: use `environment.context=template` there. A reply with a thought is tried too: Qwen3
        puts an empty one before a last reply without any, and keeps a real one while tools answer.
        """
        last = response_ids[-1] if response_ids and response_ids[-1] in self.stop_ids else None
        name = self.calls.recipient(self.response_text(response_ids)) if observation.role == "tool" else ""
        return self._delta(observation, name, last)

    def _make_delta(self, observation: Observation, name: str, last: int | None) -> list[int]:
        after = self.calls.observed(self._role(observation), observation.text, name)
        for reply in self.calls.samples(_MARKER, name):
            head, full = self.render([_QUESTION, reply], [], prompt=False), self.render([_QUESTION, reply, after], [], prompt=True)
            stable = head[: head.rindex(_MARKER) + len(_MARKER)]
            if name:  # the marker is inside a call: the rest of that call too
                stable += self._plain.match(head, len(stable)).group()  # type: ignore[union-attr]
            end = self._special_at(full[len(stable):])
            if full.startswith(stable) and end:
                closed = last is not None and (self._ends or last == self._special[end])
                return self.encode(full[len(stable) + (len(end) if closed else 0):])
        raise ValueError(f"the chat template rewrites an earlier message when a {observation.role!r} message follows, or ends it with no "
                         f"token of its own; set environment.context=template, environment.train_context=recorded")

    def _role(self, observation: Observation) -> str:
        return "user" if observation.role == "tool" and not self._shows_tool else observation.role

    def _shows(self, role: str) -> bool:
        """Whether the template shows a message of `role` after a reply; some pass over it, others refuse it."""
        from jinja2 import TemplateError

        if isinstance(self.calls, StructuredFormat):
            return True  # after a call
        try:
            return _MARKER in self.render([_QUESTION, {"role": "assistant", "content": "reply"}, {"role": role, "content": _MARKER}], [], prompt=True)
        except TemplateError:
            return False

    def _find_stops(self, given: Sequence[int]) -> tuple[int, ...]:
        reply = {"role": "assistant", "content": _MARKER}
        ends = [self.render([_QUESTION, reply], [], prompt=False)]
        self._ends = bool(ends[0].rpartition(_MARKER)[2].strip())
        if not self._ends:  # GLM: the next message begins where this one ends
            ends = [self.render([_QUESTION, reply, {"role": role, "content": "next"}], [], prompt=True) for role in ("user", "tool")]
        after = [text.rpartition(_MARKER)[2] for text in ends]
        found = [self._special[end] for end in map(self._special_at, after) if end]
        if not found:
            raise ValueError(f"the chat template ends an assistant message with {after[0][:20]!r}, which is no special token of the tokenizer "
                             f"(eos_token is {self.tokenizer.eos_token!r}); add what ends a message to the tokenizer's special tokens")
        own = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token else []
        extra = [self._special[token] for token in self.calls.stops if token in self._special]
        return tuple(dict.fromkeys([*found, *own, *extra, *given]))

    def _special_at(self, text: str) -> str:
        """The special token that `text` begins with; empty: none."""
        return max((token for token in self._special if text.startswith(token)), key=len, default="")

    def _in_thought(self, context: Sequence[int]) -> bool:
        return self.tokenizer.decode(list(context[-8:]), skip_special_tokens=False).rstrip().endswith("<think>")


def chat_template(config: Config, model_path: str) -> ChatTemplate:
    """The chat template of the model at `model_path`, as the configuration wants it used."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # a model need not have one
        ends = None
    stops = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return ChatTemplate(AutoTokenizer.from_pretrained(model_path), calls=config.model.tool_calls, tools_in=config.environment.tools_in,
                        args=config.model.template_args, stops=stops)


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
        messages, shown = self._template.opening(system, tools, first)
        self._ids = self._template.encode(self._template.render(messages, shown, prompt=True))

    def context(self) -> list[int]:
        return list(self._ids)

    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        self._ids += [*response_ids, *self._template.delta(response_ids, observation)]

    def snapshot(self) -> Any:
        return list(self._ids)

    def restore(self, snapshot: Any) -> None:
        self._ids = list(snapshot)


class Template(ContextBuilder):
    """c_k is the whole chat rendered anew, so a template may drop or rewrite what came before (Qwen3 drops earlier thoughts).

    `strip`: drop the thoughts of earlier responses before the template sees them.
    """

    def __init__(self, template: ChatTemplate, strip: bool = False) -> None:
        super().__init__(template)
        self._strip = strip
        self._opening: list[dict[str, Any]] = []
        self._turns: list[list[dict[str, Any]]] = []  # of messages: response, observation
        self._tools: list[dict[str, Any]] = []

    def start(self, system: str, tools: list[dict[str, Any]], first: Observation) -> None:
        self._opening, self._tools = self._template.opening(system, tools, first)
        self._turns = []

    def context(self) -> list[int]:
        return self._render(self._messages())

    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        text = self._template.response_text(response_ids, self.context() if self._template.opens_thoughts else ())
        self._turns.append(self._template.turn(text, observation, strip=self._strip))

    def snapshot(self) -> Any:
        return copy.deepcopy((self._opening, self._turns, self._tools))

    def restore(self, snapshot: Any) -> None:
        self._opening, self._turns, self._tools = copy.deepcopy(snapshot)

    def _messages(self) -> list[dict[str, Any]]:
        return [*self._opening, *itertools.chain.from_iterable(self._turns)]

    def _render(self, messages: list[dict[str, Any]]) -> list[int]:
        return self._template.encode(self._template.render(messages, self._tools, prompt=True))


class Window(Template):
    """c_k is the opening and the last `window` turns, rendered anew. Raises ValueError when `window` is below 1."""

    def __init__(self, template: ChatTemplate, window: int, strip: bool = False) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; expected at least 1")
        super().__init__(template, strip)
        self._window = window

    def extend(self, response_ids: Sequence[int], observation: Observation) -> None:
        super().extend(response_ids, observation)
        del self._turns[: -self._window]


class Summary(Template):
    """c_k is the opening and the model's own summaries of turns 0..k-1, listed at the end of the opening's last message.

    No message of its own, so that user and assistant alternate as some templates demand. Until a turn is summed up it stays raw.
    """

    def __init__(self, template: ChatTemplate, strip: bool = False) -> None:
        super().__init__(template, strip)
        self._summaries: list[str] = []

    def start(self, system: str, tools: list[dict[str, Any]], first: Observation) -> None:
        super().start(system, tools, first)
        self._summaries = []

    def summary_request(self) -> list[int] | None:
        return self._render(_say(self._messages(), SUMMARY_REQUEST)) if self._turns else None

    def summarise(self, response_ids: Sequence[int]) -> None:
        """Keep the summary on one line and without its thought, unless that is all there is: chat templates drop thoughts from assistant
        messages only."""
        text = self._template.response_text(response_ids)
        self._summaries.append(" ".join((self._template.calls.strip_thought(text).strip() or text).split()))
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
        return [*_say(self._opening, "\n- ".join([SUMMARIES, *self._summaries])), *itertools.chain.from_iterable(self._turns)]


BUILDERS: dict[str, type[ContextBuilder]] = {"append": Append, "template": Template, "window": Window, "summary": Summary}


def build_context(name: str, template: ChatTemplate, window: int, thoughts: str = "template") -> ContextBuilder:
    """The builder of that name; `window` counts for "window" alone, thoughts="strip" for all but "append", which keeps what was sampled.
    Raises ValueError for a window below 1."""
    builder, strip = BUILDERS[name], thoughts == "strip"
    if issubclass(builder, Window):
        return builder(template, window, strip)
    return builder(template, strip) if issubclass(builder, Template) else builder(template)


def _say(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` said by the user at the end: inside the last message where that is the user's, else as a new one."""
    last = messages[-1]
    if last["role"] == "user":
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
