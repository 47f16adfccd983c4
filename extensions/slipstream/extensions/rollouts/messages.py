"""Finds the messages that a chat template wrote into the tokens of an episode.

A batch has tokens, not messages. What the template writes around each role is learnt from
conversations of marks. Messages that are read by it count only if the template writes the very same
tokens for them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.rollout_server.chat import REPLY, ChatMessage, TemplateInputs
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed

_MARK = "slipstreamrolloutmark"
# An id of a tool's call that every template takes.
_CALL_ID = "slpstrm00"
# Conversations that show what stands between two roles, in the order in which they are believed.
_CONVERSATIONS = (
    "user",
    "system user",
    "developer user",
    "user assistant user",
    "user user",
    "user assistant tool",
    "user assistant tool tool",
    "user assistant tool assistant user",
)
# Most special tokens that end a reply.
_MOST_ENDS = 2


class Unreadable(Exception):  # noqa: N818 - what the tokens are, not what failed
    """Raised, with the cause, for tokens that the template writes for no messages."""


@dataclass(frozen=True)
class TemplateForm:
    """What a template writes around the texts of messages."""

    # Before the first message, by its role.
    beginnings: Mapping[str, str]
    # Between two messages, by their roles.
    transitions: Mapping[tuple[str, str], str]
    # After the last message, by its role: with what begins a reply.
    endings: Mapping[str, str]

    def changed(self, change: Callable[[str], str]) -> TemplateForm:
        """Returns the form with each of its texts changed."""
        beginnings = {role: change(text) for role, text in self.beginnings.items()}
        transitions = {roles: change(text) for roles, text in self.transitions.items()}
        endings = {role: change(text) for role, text in self.endings.items()}
        return TemplateForm(beginnings, transitions, endings)

    def messages_in(self, text: str, *, after_reply: bool) -> Iterator[list[ChatMessage]]:
        """Yields the ways to read `text` as messages; `after_reply` as those behind a reply."""
        starts = dict(self.beginnings)
        if after_reply:
            starts = {
                following: transition
                for (role, following), transition in self.transitions.items()
                if role == "assistant"
            }
        # The longest comes first: it may hold a system message that the template adds itself.
        roles = sorted(starts, key=lambda role: len(starts[role]), reverse=True)
        for role in roles:
            start = starts[role]
            if not text.startswith(start):
                continue
            messages = self._messages_from(text, len(start), role)
            if messages is not None:
                yield messages

    def _messages_from(self, text: str, place: int, role: str) -> list[ChatMessage] | None:
        """Returns the messages of which the first one's text begins at `place`, or None."""
        messages: list[ChatMessage] = []
        while True:
            transition = self._next_transition(text, place, role)
            end = len(text) if transition is None else transition.start
            ending = self.endings.get(role)
            if ending is not None and text.endswith(ending):
                last = len(text) - len(ending)
                if place <= last <= end:
                    content = text[place:last]
                    messages.append(ChatMessage(role, content))
                    return messages
            if transition is None:
                return None
            content = text[place:end]
            messages.append(ChatMessage(role, content))
            place = transition.end
            role = transition.following

    def _next_transition(self, text: str, place: int, role: str) -> _Transition | None:
        """Returns where a message of another role may follow `role` first; the longest there."""
        nearest: _Transition | None = None
        for (before, following), written in self.transitions.items():
            if before != role or not written:
                continue
            start = text.find(written, place)
            if start < 0:
                continue
            transition = _Transition(start, start + len(written), following)
            if nearest is None or transition.rank < nearest.rank:
                nearest = transition
        return nearest


class _Transition(NamedTuple):
    """A place in a text between two messages, and the role of the second one."""

    start: int
    end: int
    following: str

    @property
    def rank(self) -> tuple[int, int]:
        return self.start, -self.end


def learnt_form(renderer: Renderer, inputs: TemplateInputs) -> TemplateForm:
    """Returns what the renderer's template writes around messages of each role that it takes."""
    beginnings: dict[str, str] = {}
    transitions: dict[tuple[str, str], str] = {}
    endings: dict[str, str] = {}
    for conversation in _CONVERSATIONS:
        roles = conversation.split()
        marks: list[str] = []
        messages: list[ChatMessage] = []
        for number, role in enumerate(roles):
            mark = f"{_MARK}{number}end"
            call_id = _CALL_ID if role == "tool" else ""
            marks.append(mark)
            messages.append(ChatMessage(role, mark, tool_call_id=call_id))
        try:
            text = renderer.text(tuple(messages), inputs)
        except RenderingFailed:
            # A template may refuse a role, or this order of roles.
            continue
        parts = _parts_around(text, marks)
        if not parts:
            continue
        beginnings.setdefault(roles[0], parts[0])
        endings.setdefault(roles[-1], parts[-1])
        for pair, part in zip(itertools.pairwise(roles), parts[1:-1], strict=True):
            transitions.setdefault(pair, part)
    return TemplateForm(beginnings, transitions, endings)


def _parts_around(text: str, marks: Sequence[str]) -> list[str]:
    """Returns the parts of a text before, between and behind the marks; [] if it lacks one."""
    parts: list[str] = []
    for mark in marks:
        before, separator, text = text.partition(mark)
        if not separator:
            return []
        parts.append(before)
    return [*parts, text]


class MessageReader:
    """Reads the contexts and replies of episodes that were rendered with the same inputs."""

    def __init__(self, renderer: Renderer, inputs: TemplateInputs) -> None:
        """`inputs` are those of the episodes; offered tools are read as part of a message."""
        self._renderer = renderer
        self._inputs = inputs
        form = learnt_form(renderer, inputs)
        # A tokenizer of words joins them by spaces, which the template does not write.
        self._forms = (form, form.changed(self._joined))

    def _joined(self, text: str) -> str:
        try:
            token_ids = self._renderer.tokens(text)
        except RenderingFailed:
            return text
        return self._renderer.decode_all(token_ids).strip()

    def prompt(self, token_ids: Sequence[int]) -> list[ChatMessage]:
        """Returns the messages before a first reply; raises Unreadable."""
        text = self._renderer.decode_all(token_ids)
        for messages in self._readings(text, after_reply=False):
            with contextlib.suppress(RenderingFailed):
                if self._renderer.prompt(messages, self._inputs) == list(token_ids):
                    return messages
        raise Unreadable("the chat template writes its prompt for no messages")

    def following(
        self, history: Sequence[ChatMessage], last_token: int, token_ids: Sequence[int]
    ) -> list[ChatMessage]:
        """Returns the messages between a reply that ended with `last_token` and the next reply.

        `history` ends with `REPLY`. Raises Unreadable.
        """
        shown = list(token_ids)
        if last_token in self._renderer.added:
            # The template writes the end of the reply, which the model has said already.
            shown.insert(0, last_token)
        text = self._renderer.decode_all(shown)
        for messages in self._readings(text, after_reply=True):
            with contextlib.suppress(RenderingFailed):
                written = self._renderer.continuation(history, messages, last_token, self._inputs)
                if written == list(token_ids):
                    return messages
        raise Unreadable("the chat template writes what follows a reply for no messages")

    def reply(
        self,
        token_ids: Sequence[int],
        history: Sequence[ChatMessage],
        following: Sequence[ChatMessage],
    ) -> str:
        """Returns the text for which the template writes this reply; raises Unreadable.

        `history` are the messages before it, `following` those behind it. Other tokens of the same
        text count as the same.
        """
        decode_all = self._renderer.decode_all
        reply_text = decode_all(token_ids)
        cause = "the chat template writes it otherwise"
        for text in self._without_ends(token_ids):
            for content in dict.fromkeys((text.strip(), text)):
                try:
                    written = self._renderer.reply(
                        content,
                        history,
                        self._inputs,
                        following=following,
                    )
                except RenderingFailed as error:
                    cause = str(error)
                    continue
                if decode_all(written) == reply_text:
                    return content
        raise Unreadable(f"a reply cannot be given again: {cause}")

    def _without_ends(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Yields the texts of a reply without its last special tokens, the shortest first."""
        num_ends = 0
        for token_id in reversed(token_ids[-_MOST_ENDS:]):
            if token_id not in self._renderer.added:
                break
            num_ends += 1
        for number in range(num_ends, -1, -1):
            end = len(token_ids) - number
            yield self._renderer.decode_all(token_ids[:end])

    def _readings(self, text: str, *, after_reply: bool) -> Iterator[list[ChatMessage]]:
        for form in self._forms:
            for messages in form.messages_in(text, after_reply=after_reply):
                stripped = [
                    message._replace(content=message.content.strip()) for message in messages
                ]
                yield stripped
                yield messages


def with_reply(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns a history in which a reply stands behind `messages`."""
    return [*messages, REPLY]
