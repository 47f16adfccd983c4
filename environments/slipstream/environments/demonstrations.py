"""Conversations from a file, whose replies the model learns to give."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.client.environment import Environment, Message, ResetResult, StepResult
from slipstream.core.errors import ConfigError
from slipstream.environments.arguments import check_at_least
from slipstream.environments.question_files import Cell, Row, message_of, named_rows, text_of

REPLY_ROLE = "assistant"


class Reply(NamedTuple):
    """A prompt and the reply to it."""

    messages: tuple[Message, ...]
    reply: str


Conversation = tuple[Reply, ...]


class Demonstrations(Environment[Conversation]):
    """Gives the replies of a parquet or JSON-lines file; the model samples nothing.

    A row is a conversation: a column of messages with `role` and `content`, or a prompt and a
    reply. The model is trained on each assistant message. The reward is 1. Use
    `algorithm.advantage = "score"`, `loss = "reinforce"` and `weight = "none"`.
    """

    def __init__(
        self,
        path: str,
        *,
        messages: str = "messages",
        prompt: str | None = None,
        reply: str | None = None,
        system: str | None = None,
        shuffle_seed: int | None = None,
        limit: int | None = None,
    ) -> None:
        """Takes conversations from the column `messages`, or from the columns `prompt` and `reply`.

        `system` is the text of a system message before each conversation. Raises ConfigError, which
        names the argument or row at fault.
        """
        if (prompt is None) != (reply is None):
            raise ConfigError(
                f"prompt and reply name columns together, got {prompt!r} and {reply!r}"
            )
        check_at_least("limit", limit, 1)
        first = [Message("system", system)] if system else []
        self._conversations = [
            _turns([*first, *_messages(row, prompt or messages, reply, where)], where)
            for where, row in named_rows(Path(path))
        ]
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._conversations)
        self._conversations = self._conversations[:limit]

    def tasks(self) -> list[Conversation]:
        """Returns the conversations, in the order of the file unless they were shuffled."""
        return self._conversations

    def reset(self, task: Conversation) -> ResetResult:
        """Returns the messages before the first reply, and that reply."""
        self._left = list(task[1:])
        return ResetResult(task[0].messages, reply=task[0].reply)

    def step(self, reply: str) -> StepResult:
        """Returns the next turn, or reward 1 after the last turn.

        `reply` is the demonstrated reply of the previous turn, and is not read.
        """
        if not self._left:
            return StepResult(reward=1.0)
        turn = self._left.pop(0)
        return StepResult(done=False, messages=turn.messages, reply=turn.reply)


def _messages(row: Row, column: str, reply: str | None, where: str) -> list[Message]:
    found, named = _cell(row, column, where), f"{where}: column {column!r}"
    if reply is not None:
        right = text_of(_cell(row, reply, where), f"{where}: column {reply!r}")
        return [Message("user", text_of(found, named)), Message(REPLY_ROLE, right)]
    if not isinstance(found, list):
        raise ConfigError(f"{named} must hold a list of messages")
    return [_message(one, named) for one in found]


def _message(message: Cell, where: str) -> Message:
    if isinstance(message, dict) and message.get("tool_calls"):
        raise ConfigError(f"{where} holds tool_calls: write them into content as the model would")
    return message_of(message, where)


def _cell(row: Row, column: str, where: str) -> Cell:
    if not row.get(column):
        raise ConfigError(
            f"{where} has nothing in the column {column!r}; its columns are {', '.join(row)}"
        )
    return row[column]


def _turns(messages: Sequence[Message], where: str) -> Conversation:
    """Returns the turns up to the last reply; messages after it are dropped.

    Raises ConfigError for an empty reply, a reply without a message before it, or no reply at all.
    """
    turns: list[Reply] = []
    read: list[Message] = []
    for message in messages:
        if message.role != REPLY_ROLE:
            read.append(message)
            continue
        if not read:
            raise ConfigError(f"{where}: a reply must follow a message, got two replies or none")
        if not message.text:
            raise ConfigError(f"{where}: a reply is empty")
        turns.append(Reply(tuple(read), message.text))
        read = []
    if not turns:
        raise ConfigError(f"{where} has no message with role = {REPLY_ROLE!r}")
    return tuple(turns)
