"""Reads the text of replies, all tokens that are new at once."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from slipstream.rollout_server.engine_interface import TextOptions, TextPart

# Tokens of the prompt that are decoded with the first ones of a reply.
_CONTEXT = 8
# What a decoder writes for bytes that are no character, or not yet.
_NO_CHARACTER = "\ufffd"


def is_read_by_us(options: TextOptions) -> bool:
    """Whether a reply without stop texts is read by `ReplyText`, and not by vLLM.

    vLLM reads tokens one by one, and their log-probabilities too. That takes most of the server's
    time; to read all that are new at once takes next to none.
    """
    return options.num_logprobs is None and options.spaces_between_special_tokens


class ReplyText:
    """The text of one reply, read as its tokens come; vLLM reads the same token by token.

    The token that ended the reply is left out, and so are the bytes of a character that is cut.
    Bytes inside a reply that are no text become U+FFFD; vLLM loses some of the text behind them.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - the tokenizer of vLLM
        prompt: Sequence[int],
        options: TextOptions,
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        # Tokens before `_told` were read; those from `_start` are decoded once more with the new
        # ones, since a space before the first word is kept only behind other text. Of the text of
        # the others `_said` characters were returned.
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._told, self._said = 0, len(self._ids), 0

    def read(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """Returns the text that is new with the reply's next tokens.

        `finish_reason` is vLLM's; None if more tokens come.
        """
        self._ids += token_ids
        if finish_reason == "stop" and not self._options.with_stop:
            self._ids.pop()
        before = self._decoded(self._ids[self._start : self._told])
        text = self._decoded(self._ids[self._start :])
        if text.startswith(before):
            text = text[len(before) :]
        else:
            text = self._decoded(self._ids[self._told :])
        # The rest of a character may come with the next tokens.
        whole = text.rstrip(_NO_CHARACTER)
        new = whole[self._said :]
        if whole != text:
            self._said = len(whole)
            return new
        if text:
            self._start = self._told
        self._told, self._said = len(self._ids), 0
        return new

    def parts(self, new: TextPart, finish_reason: str | None) -> list[TextPart]:
        """Returns a part of the reply with its text, or a part for each of its tokens."""
        is_split = self._options.is_streamed and self._options.parts == "tokens"
        if not is_split or not new.token_ids:
            return [dataclasses.replace(new, text=self.read(new.token_ids, finish_reason))]
        *others, last = new.token_ids
        found = [TextPart([token], self.read([token], None)) for token in others]
        text = self.read([last], finish_reason)
        return [*found, dataclasses.replace(new, token_ids=[last], text=text)]

    def _decoded(self, ids: Sequence[int]) -> str:
        skip = self._options.skip_special_tokens
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip)
        return text
