"""Turns chat messages into token ids, through the chat template of the model's tokenizer.

A conversation is tokenised once: sampled tokens stay as they were sampled, and later messages are
appended to them.
"""

import contextlib
import json
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
from pydantic import JsonValue
from slipstream.core.configuration.config_file import vocabulary_size
from slipstream.core.configuration.reply_ends import (
    NO_ENDS,
    ReplyEnds,
    end_of_reply,
    leading_tokens,
)
from slipstream.core.errors import ConfigError, did_you_mean, near_names
from slipstream.core.models.images import ImageTokens, PlacedImage
from slipstream.core.models.thoughts import begins_thoughts, marks_thoughts, split_thoughts
from slipstream.core.template_values import OWNED, read_template
from slipstream.rollout_server.chat import (
    NO_INPUTS,
    PLACEHOLDER,
    REPLY,
    ChatMessage,
    ParsedReply,
    TemplateInputs,
)

# Number of cached prompts: the members of a group begin together. A long prompt takes a megabyte.
_CACHED_PROMPTS = 128
# Longest text between two replies that is cached: longer ones, mostly tool results, hardly recur.
_CACHED_CHARACTERS = 1000
# Characters that a token may stand for even where no entry of the vocabulary is as long.
_LONG_TOKEN = 128
# Characters of a prompt that an error shows.
_SHOWN = 40
# Tokens at the end of a prompt in which a template may begin thoughts.
LAST_TOKENS = 16

# A tool with which a template is tried.
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
_ADD = {"name": "add", "description": "Adds two numbers.", "parameters": _PARAMETERS}
TOOLS = json.dumps([{"type": "function", "function": _ADD}])
# Stands for a user's message.
_ASKED = ChatMessage("user", "a")
# Stands, with a number, for a text of a message.
_MARK = "slipstreammessage"


class Renderer:
    """Renders and decodes texts with the tokenizer of one model folder."""

    def __init__(
        self,
        folder: Path,
        *,
        template: Path | None = None,
        values: Mapping[str, JsonValue] = MappingProxyType({}),
        images: ImageTokens | None = None,
        ends: ReplyEnds = NO_ENDS,
    ) -> None:
        """Loads the tokenizer. Raises ConfigError if its chat template is missing or does not work.

        `template` is a file that replaces the tokenizer's own template; `values` are passed to it
        by name. `images` expands image tokens, and is None if the model sees no images. `ends` are
        those of replies in the run.
        """
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # The tokenizer's own call would set these again for each text.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._vocabulary = vocabulary_size(folder)
        self._values = dict(values)
        self.images = images
        self.ends = ends
        if template is not None:
            self._tokenizer.chat_template = read_template(template)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.path: the tokenizer in {folder} has no chat template: name a file with one "
                "in rollout_server.chat_template"
            )
        # The texts of special and added tokens.
        self.added = {token: text for text, token in self._tokenizer.get_added_vocab().items()}
        # Whether `decode` leaves out marks of thoughts.
        self._hides_thoughts = any(map(marks_thoughts, self._tokenizer.all_special_tokens))
        # The most characters that a token stands for.
        self.longest_token = max(_LONG_TOKEN, *map(len, self._tokenizer.get_vocab()))
        # The members of a group have the same prompt.
        self._prompt = lru_cache(_CACHED_PROMPTS)(self._render)
        self._tokens = lru_cache(_CACHED_PROMPTS)(self._tokenise)
        # Texts like those of `decode_all`, of tuples of tokens.
        self.decode_prompt = lru_cache(_CACHED_PROMPTS)(self.decode_all)
        self._left_out = lru_cache(_CACHED_PROMPTS)(self._find_left_out)
        try:
            with limited_memory():
                self._tokenise(self.text((_ASKED,), NO_INPUTS))
        except RenderingFailed as error:
            where = f"model.path: the chat template in {folder}"
            if template is not None:
                where = f"rollout_server.chat_template: {template}"
            raise ConfigError(f"{where} fails: {error}") from error
        if cause := self.unread(self._values):
            raise ConfigError(f"rollout_server.{cause}")
        # The special token that the template writes first behind a reply, if any.
        self._closing_marks: list[str] = []
        with contextlib.suppress(RenderingFailed):
            closing = self._tail((_ASKED, REPLY), NO_INPUTS, is_closed=True)
            self._closing_marks = self._leading(closing)[:1]

    def asking(self, text: str, answered: Callable[[], str]) -> str:
        """Returns the text of a prompt with what begins a reply, where the template leaves it out.

        `answered` returns the text of the prompt's messages with `REPLY` behind them.
        """
        if not any(map(text.rstrip().endswith, self._closing_marks)):
            return text
        before = answered().split(PLACEHOLDER)[-2]
        return before if before.startswith(text) else text

    def _asking(
        self,
        text: str,
        messages: tuple[ChatMessage, ...],
        inputs: TemplateInputs,
    ) -> str:
        return self.asking(text, lambda: self.text((*messages, REPLY), inputs, is_closed=True))

    def prompt(
        self, messages: Sequence[ChatMessage], inputs: TemplateInputs = NO_INPUTS
    ) -> list[int]:
        """Returns the tokens of `messages`, which precede the first reply.

        Raises RenderingFailed if the template raises an error or leaves out a message.
        """
        return list(self._prompt(tuple(messages), inputs))

    def continuation(
        self,
        history: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        last_token: int | None,
        inputs: TemplateInputs = NO_INPUTS,
        *,
        whole: Sequence[ChatMessage] = (),
    ) -> list[int]:
        """Returns the tokens between a sampled reply and the next one.

        `history` ends with the sampled reply (`REPLY`); `messages` follow it. `last_token` is the
        last token of that reply: if it ends a reply, the result lacks the template's end. Raises
        RenderingFailed if the template fails or leaves out a message, or if `whole`, the same
        conversation with the real replies, does not end as the one with `REPLY` does.
        """
        tail = self._tail((*history, *messages), inputs)
        self._check_written((_ASKED, REPLY, *messages), inputs)
        written = tail
        # The model may write calls that the template cannot write.
        with contextlib.suppress(RenderingFailed):
            written = self.text(tuple(whole), inputs) if whole else tail
        if not written.endswith(tail):
            raise RenderingFailed("the chat template writes messages otherwise behind calls")
        tail = self._asking(tail, (*history, *messages), inputs)
        num_said = self._num_said(history, tail, self.added.get(last_token, ""), inputs)
        return self.tokens(tail.lstrip())[num_said:] if num_said else self.tokens(tail)

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a rendered text, which has its special tokens already.

        Raises RenderingFailed for a token that the model lacks.
        """
        is_short = len(text) <= _CACHED_CHARACTERS
        return list(self._tokens(text) if is_short else self._tokenise(text))

    def _num_said(
        self, history: Sequence[ChatMessage], tail: str, last: str, inputs: TemplateInputs
    ) -> int:
        """Returns how many special tokens of `tail` a reply that ends with `last` has said already.

        A template may end the last reply otherwise than earlier ones, as gpt-oss' does.
        """
        first = self._leading(tail)
        if last in first:
            return first.index(last) + 1
        if not (first and last):
            return 0
        closing, going_on = (self._tail(tuple(history), inputs, is_closed=c) for c in (True, False))
        return int(
            self._leading(closing)[:1] == [last] and self._leading(going_on)[:1] == first[:1]
        )

    def reply(
        self,
        text: str,
        messages: Sequence[ChatMessage],
        inputs: TemplateInputs = NO_INPUTS,
        *,
        following: Sequence[ChatMessage] = (),
    ) -> list[int]:
        """Returns the tokens that a model would sample to reply `text` after `messages`.

        They are the tokens between the template's generation prompt and the end of the reply, with
        the token that ends a reply. That is the special token that the template writes behind a
        last reply; else before `following`, or a user's message if nothing follows; else one in
        the reply before a tool's result, or the tokenizer's EOS. Raises RenderingFailed if the
        template does not write the reply after its generation prompt, or writes words behind it.
        """
        prompt = self.text(tuple(messages), inputs)
        rendered = self.text((*messages, ChatMessage("assistant", text)), inputs, is_closed=True)
        closing = self._tail((*messages, REPLY), inputs, is_closed=True)
        if not (rendered.startswith(prompt) and rendered.endswith(closing)):
            raise RenderingFailed(
                "the chat template writes this reply otherwise than behind its generation prompt, "
                f"which ends with {prompt[-_SHOWN:]!r}: begin the reply as that ends, or name a "
                "template in rollout_server.chat_template that continues it"
            )
        marks = [place for token in self.added.values() if (place := closing.find(token)) >= 0]
        if marks and (words := closing[: min(marks)].strip()):
            raise RenderingFailed(
                f"the chat template writes {words[:_SHOWN]!r} between a reply and its end: name a "
                "template in rollout_server.chat_template that writes nothing there"
            )
        reply_text = rendered[len(prompt) : len(rendered) - len(closing)]
        if end_mark := next((end for end in self._leading(closing)[:1] if end in reply_text), ""):
            raise RenderingFailed(
                f"the reply {text[:_SHOWN]!r} holds {end_mark}, which the chat template writes at "
                "its end: leave it out"
            )

        def followed() -> str:
            return self._tail((*messages, REPLY, *(following or (_ASKED,))), inputs, is_closed=True)

        end_marks = end_of_reply(closing, followed, self.added.values())
        end_marks = self._up_to_an_end(end_marks)
        if end_marks:
            tail = closing if self._leading(closing) else followed()
            space = tail[: len(tail) - len(tail.lstrip())]
            return list(self._tokenise(reply_text + space + "".join(end_marks)))
        tokens = list(self._tokenise(reply_text))
        last = self._tokenizer.eos_token_id
        if following and following[0].role == "tool":
            if tokens[-1] in self.added:
                return tokens
            raise RenderingFailed(
                "the chat template writes no special token between a reply and the result of a "
                f"tool: end the reply {reply_text[:_SHOWN]!r} with one"
            )
        return tokens if last is None else [*tokens, last]

    def _leading(self, text: str) -> list[str]:
        return leading_tokens(text, self.added.values())

    def _up_to_an_end(self, marks: list[str]) -> list[str]:
        """Returns `marks` up to the first at which sampling ends a reply, or all of them."""
        end_texts = [self.added.get(token_id) for token_id in self.ends.token_ids]
        for number, mark in enumerate(marks, start=1):
            if mark in end_texts:
                return marks[:number]
        return marks

    def with_images(
        self, tokens: list[int], messages: Sequence[ChatMessage]
    ) -> tuple[list[int], list[PlacedImage]]:
        """Returns `tokens` of `messages` with image tokens inserted, and the images with offsets.

        Raises RenderingFailed for a model without vision, or for bytes that are no image.
        """
        images = [image for message in messages for image in message.images]
        if self.images is None:
            if images:
                raise RenderingFailed(
                    "a message has an image, but the model sees none: it has no vision tower, or "
                    "sampling.max_images is 0"
                )
            return tokens, []
        try:
            return self.images.expanded(tokens, images)
        except ValueError as error:
            raise RenderingFailed(str(error)) from error

    @property
    def image_text(self) -> str:
        """The text that the template writes for an image."""
        shown = ChatMessage("user", "", parts=(f"{_MARK}0", b"", f"{_MARK}1"))
        text = self.text((shown,), NO_INPUTS)
        return text.partition(f"{_MARK}0")[2].partition(f"{_MARK}1")[0]

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the values that the template reads."""
        from transformers.utils.chat_template_utils import _get_template_variables

        texts = self._tokenizer.chat_template
        texts = texts.values() if isinstance(texts, dict) else (texts,)
        return frozenset().union(*map(_get_template_variables, texts))

    def unread(self, names: Iterable[str]) -> str:
        """Returns a line on the first of these names that the template does not read, or ""."""
        for name in names:
            if name not in self.variables:
                near = near_names(name, self.variables - OWNED)
                hint = did_you_mean(near) if near else "leave it out"
                return f"chat_template_kwargs: the chat template does not read {name!r}; {hint}"
        return ""

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes the offered tools into the prompt.

        Raises RenderingFailed if the template fails with tools.
        """
        messages = (_ASKED,)
        return self.text(messages, TemplateInputs(TOOLS)) != self.text(messages, NO_INPUTS)

    def cannot_fit(self, messages: Sequence[ChatMessage], num_tokens: int) -> bool:
        """Returns whether `messages` have more characters than `num_tokens` tokens can stand for.

        The check is cheap; tokenising such a long text would delay all other episodes.
        """
        characters = sum(message.num_characters for message in messages)
        return characters > num_tokens * self.longest_token

    def special_in(self, messages: Sequence[ChatMessage]) -> str:
        """Returns a special token that a text of `messages` spells, or "" if there is none."""
        texts = [m.content for m in messages] + [p for m in messages for p in m.parts]
        written = "\n".join(text for text in texts if isinstance(text, str))
        return next((str(t) for t in self._tokenizer.all_special_tokens if t in written), "")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a reply, without special tokens."""
        return self._decode(token_ids, skip_special_tokens=True)

    def told_apart(
        self,
        before: Sequence[int],
        reply: Sequence[int],
        text: str,
        parsed: ParsedReply | None,
    ) -> ParsedReply | None:
        """Returns `parsed` with the thoughts told apart, or None if no parser read and no mark is.

        `reply` follows the tokens `before`, in which the template may have begun thoughts; `text`
        is that of `decode`.
        """
        reply_text = text if parsed is None else parsed.content
        if parsed is None and self._hides_thoughts:
            reply_text = self.decode_all(reply)
        is_open = begins_thoughts(self.decode_all(before[-LAST_TOKENS:]))
        thoughts, answer = split_thoughts(reply_text, is_open=is_open)
        if answer == reply_text:
            return parsed
        for token in self._tokenizer.all_special_tokens:
            thoughts = thoughts.replace(token, "")
            answer = answer.replace(token, "")
        return (parsed or ParsedReply(""))._replace(content=answer, reasoning=thoughts)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of any tokens, special tokens included, for people to read."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # An array is faster: the tokenizer first checks each element of a list.
        ids = np.asarray(token_ids, dtype=np.int64)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _tail(
        self, messages: tuple[ChatMessage, ...], inputs: TemplateInputs, *, is_closed: bool = False
    ) -> str:
        """Returns the rendered text after the last placeholder for a reply.

        Raises RenderingFailed if the template fails or leaves out the placeholder.
        """
        _, placeholder, tail = self.text(messages, inputs, is_closed=is_closed).rpartition(
            PLACEHOLDER
        )
        if not placeholder:
            raise RenderingFailed("the chat template leaves out the assistant's replies")
        return tail

    def text(
        self, messages: tuple[ChatMessage, ...], inputs: TemplateInputs, *, is_closed: bool = False
    ) -> str:
        """Returns the rendered text, which ends with a generation prompt unless `is_closed`.

        Raises RenderingFailed if the template raises an error.
        """
        values = self._values
        if inputs.values:
            values = values | json.loads(inputs.values)
        if inputs.tools:
            values = values | {"tools": json.loads(inputs.tools)}
        try:
            with limited_time():
                return str(
                    self._tokenizer.apply_chat_template(
                        [message.for_template() for message in messages],
                        add_generation_prompt=not is_closed,
                        tokenize=False,
                        **values,
                    )
                )
        except Exception as error:
            # A template is a program, which may raise anything.
            complaint = " ".join(str(error).split())
            raise RenderingFailed(f"{type(error).__name__}: {complaint}") from error

    def _render(self, messages: tuple[ChatMessage, ...], inputs: TemplateInputs) -> tuple[int, ...]:
        if inputs.values and (cause := self.unread(json.loads(inputs.values))):
            raise RenderingFailed(cause)
        text = self.text(messages, inputs)
        text = self._asking(text, messages, inputs)
        self._check_written(messages, inputs)
        asks, *_ = text.removeprefix(self.text(messages, inputs, is_closed=True)).split() or [""]
        if asks and messages[-1].content.rstrip().endswith(asks):
            raise RenderingFailed(
                f"the last message ends with {asks!r}, as a template writes it: give messages, or "
                "the question alone"
            )
        return self._tokenise(text)

    def _check_written(self, messages: tuple[ChatMessage, ...], inputs: TemplateInputs) -> None:
        """Raises RenderingFailed if the template leaves out a message or a call of a tool."""
        number = self._left_out(tuple(_marked(messages)), inputs)
        if number is not None:
            left_out = messages[number]
            calls = ", ".join(call.name for call in left_out.tool_calls)
            what = f"the calls of {calls} in a message" if calls else "a message"
            what = f"the name {left_out.name!r} of {what}" if left_out.name else what
            raise RenderingFailed(
                f"the chat template leaves out {what} of role {left_out.role!r}, "
                f"{left_out.content[:_SHOWN]!r}: write it into one that the template shows, or "
                "name another template in rollout_server.chat_template"
            )

    def _find_left_out(self, marked: tuple[ChatMessage, ...], inputs: TemplateInputs) -> int | None:
        """Returns the number of the first message that the template leaves out, or None.

        The text of a message is its mark; templates take a text beside calls for thoughts.
        """
        with contextlib.suppress(RenderingFailed):
            text = self.text(marked, inputs)
            for number, message in enumerate(marked):
                if message.tool_calls:
                    silent = message._replace(tool_calls=())
                    without_calls = (*marked[:number], silent, *marked[number + 1 :])
                    is_written = self.text(without_calls, inputs) != text
                else:
                    mark = f"{_MARK}{number:04}"
                    texts = [message.content, *message.parts]
                    is_written = not any(texts) or mark in text
                    is_written &= message.name in text
                if not is_written:
                    return number
        # The template wants other texts or calls: the messages themselves are rendered too.
        return None

    def _tokenise(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text; raises RenderingFailed for one that the model lacks."""
        if self._backend is not None:
            tokens = tuple(self._backend.encode(text, add_special_tokens=False).ids)
        else:
            tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if (highest := max(tokens, default=0)) >= self._vocabulary > 0:
            raise RenderingFailed(
                f"{self._tokenizer.convert_ids_to_tokens(highest)!r} is token {highest} of the "
                f"tokenizer, and the model has only {self._vocabulary}"
            )
        return tokens


class RenderingFailed(Exception):
    """Raised, with the reason, if a conversation cannot be rendered or an image is refused."""


def _marked(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yields `messages` with a mark, which has the message's number, in place of each text."""
    ids: dict[str, str] = {}
    for number, message in enumerate(messages):
        mark = f"{_MARK}{number:04}"
        calls = [
            call._replace(id=_short(call.id, ids), arguments="{}") for call in message.tool_calls
        ]
        yield message._replace(
            content=mark if message.content else "",
            parts=tuple(mark if isinstance(part, str) else b"" for part in message.parts),
            tool_calls=tuple(calls),
            tool_call_id=_short(message.tool_call_id, ids),
            reasoning="",
            # The name of a tool is not missed: its result has an id.
            name=f"{mark}name" if message.name and message.role != "tool" else "",
        )


def _short(call_id: str, ids: dict[str, str]) -> str:
    return ids.setdefault(call_id, f"slp{len(ids):06}") if call_id else ""


# Seconds of processor time that a template may take for one conversation, and bytes of memory that
# it may take when it is tried. Any working template needs a thousandth.
PROCESSOR_S = 10.0
MEMORY_BYTES = 1 << 30
# Seconds after which a template that goes on is ended again.
_AGAIN_S = 0.1


class TemplateTooSlow(Exception):
    """Raised in a template that takes more than its processor time."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raises TemplateTooSlow in a block that takes more than `PROCESSOR_S` of processor time.

    It counts the time of all threads, and has an effect in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TemplateTooSlow(f"it took more than {PROCESSOR_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_S, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Lets allocations in a block fail that take `MEMORY_BYTES` more than the process has.

    It holds for all threads, so use it only while the process does nothing else.
    """
    before, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard_limit))
