"""Reads the text of replies, all tokens that are new at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.rollout_server.engine_interface import TextOptions
from vllm.outputs import RequestOutput

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
        # ones, since a space before the first word is kept only behind other text.
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._told = 0, len(self._ids)

    def read(self, output: RequestOutput) -> str:
        """Returns the text that is new with an output of the reply."""
        (completion,) = output.outputs
        self._ids += completion.token_ids
        if completion.finish_reason == "stop" and not self._options.with_stop:
            self._ids.pop()
        before = self._decoded(self._ids[self._start : self._told])
        text = self._decoded(self._ids[self._start :])
        if text.startswith(before):
            text = text[len(before) :]
        else:
            text = self._decoded(self._ids[self._told :])
        if output.finished:
            return text.rstrip(_NO_CHARACTER)
        if text.endswith(_NO_CHARACTER):
            # The rest of the character may come with the next tokens.
            return ""
        if text:
            self._start = self._told
        self._told = len(self._ids)
        return text

    def _decoded(self, ids: Sequence[int]) -> str:
        skip = self._options.skip_special_tokens
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip)
        return text
