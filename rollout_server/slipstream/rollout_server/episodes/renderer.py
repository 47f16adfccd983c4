"""Chat messages to token ids, through the chat template of the model's tokenizer.

A conversation is tokenised once: what the model sampled stays as it was sampled, later messages are
appended to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from slipstream.protocol.errors import ConfigError

_PLACEHOLDER = "slipstreamreplyplaceholder"
# The members of a group begin at one time; of a long prompt each costs a megabyte.
_CACHED_PROMPTS = 128
# Longer texts between two replies are hardly said twice: what tools found, mostly.
_CACHED_CHARACTERS = 1000
# A token that stands for more characters than this is in no vocabulary that is not longer itself.
_LONG_TOKEN = 128


class ChatMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


# Stands in a history for a reply whose tokens are known; no template may change it.
REPLY = ChatMessage("assistant", _PLACEHOLDER)


class RenderingFailed(Exception):
    """The chat template refuses these messages; the message says why."""


class Renderer:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer; ConfigError when it has no chat template that works."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path: the tokenizer in {folder} has no chat template")
        self._longest_token = max(_LONG_TOKEN, *map(len, self._tokenizer.get_vocab()))
        # The members of a group begin alike.
        self._prompt = lru_cache(_CACHED_PROMPTS)(self._render)
        self._tokens = lru_cache(_CACHED_PROMPTS)(self._tokenise)
        self._prompt_text = lru_cache(_CACHED_PROMPTS)(self.decode_all)
        try:
            self._text((ChatMessage("user", "a"),))
        except RenderingFailed as error:
            raise ConfigError(
                f"model.path: the chat template in {folder} fails: {error}"
            ) from error

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens before the first reply; RenderingFailed when the template refuses them."""
        return list(self._prompt(tuple(messages)))

    def continuation(
        self,
        history: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        last_token: int | None,
    ) -> list[int]:
        """The tokens between a sampled reply and the next one.

        `history` ends with that reply (`REPLY`), `messages` follow it. Where the template ends a
        reply with the token that the model sampled last, that token is not repeated; where the
        reply was cut off, it is put in.
        """
        _, found, tail = self._text((*history, *messages)).rpartition(_PLACEHOLDER)
        if not found:
            raise RenderingFailed("the chat template leaves out the assistant's replies")
        tokenise = self._tokens if len(tail) <= _CACHED_CHARACTERS else self._tokenise
        tokens = list(tokenise(tail))
        return tokens[1:] if tokens[:1] == [last_token] else tokens

    def cannot_fit(self, messages: Sequence[ChatMessage], num_tokens: int) -> bool:
        """Whether they surely have more than `num_tokens` tokens: too many characters for them.

        Costs next to nothing, while tokenizing so long a text would hold up all other episodes.
        """
        characters = sum(len(message.content) for message in messages)
        return characters > num_tokens * self._longest_token

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens."""
        return self._decode(token_ids, skip_special_tokens=True)

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """As `decode_all`, of tokens with which many episodes begin."""
        return self._prompt_text(tuple(token_ids))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of any tokens, special ones too, for people who read along."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Of a list the tokenizer looks at each element first.
        ids = np.asarray(token_ids, dtype=np.int64)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _text(self, messages: tuple[ChatMessage, ...]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [message._asdict() for message in messages],
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            # A template is a program; the last is transformers' own, for no messages at all.
            raise RenderingFailed(f"{type(error).__name__}: {error}") from error

    def _render(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        return self._tokenise(self._text(messages))

    def _tokenise(self, text: str) -> tuple[int, ...]:
        # The template has written the special tokens already.
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
