"""Conversations from a file, whose replies the model learns to give."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.client.conversion import TRAINED, holds_null, trains
from slipstream.client.environment import Environment, Message, ResetResult, StepResult
from slipstream.core.arguments import Count, checked
from slipstream.core.errors import ConfigError
from slipstream.core.template_values import tools_json
from slipstream.environments import question_files

REPLY_ROLE = "assistant"
# The column of exported rollouts that says why a row has no messages, and is empty where it has.
RECORDED = "unreadable"


class DemonstratedReply(NamedTuple):
    """A prompt and the reply to it."""

    messages: tuple[Message, ...]
    reply: str


class Conversation(NamedTuple):
    """The turns of one row, the tools that its column `tools` offers, and the message behind them.

    A chat template may end a reply otherwise before `following`, such as a tool's result.
    """

    turns: tuple[DemonstratedReply, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    following: tuple[Message, ...] = ()


class Demonstrations(Environment[Conversation]):
    """Gives the replies of a parquet or JSON-lines file; the model samples nothing.

    A row is a conversation: a column of messages with `role` and `content`, or a prompt and a
    reply. The model is trained on each assistant message. The reward is 1. Use
    `algorithm.advantage = "score"`, `loss = "reinforce"` and `weight = "none"`.

    Of exported rollouts, rows without messages or without a reply to train are left out.
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        *,
        messages: str = "messages",
        prompt: str | None = None,
        reply: str | None = None,
        system: str | None = None,
        shuffle_seed: int | None = None,
        limit: Count | None = None,
    ) -> None:
        """Takes conversations from the column `messages`, or from the columns `prompt` and `reply`.

        `system` is the text of a system message before each conversation. Raises ConfigError, which
        names the argument or row at fault.
        """
        if (prompt is None) != (reply is None):
            raise ConfigError(
                f"prompt and reply name columns together, got {prompt!r} and {reply!r}"
            )
        first = [] if system is None else [Message("system", system)]
        self._conversations = []
        cause = ""
        for where, row in question_files.named_rows(Path(path)):
            is_recorded = RECORDED in row
            if is_recorded and row[RECORDED]:
                cause = cause or f"{where}: {row[RECORDED]}"
                continue
            marked_messages = _told(row, prompt or messages, reply, where, is_recorded=is_recorded)
            if is_recorded and not any(is_trained for _, is_trained in marked_messages):
                cause = cause or f"{where}: each reply has weight 0"
                continue
            question_files.check_system(system, [message for message, _ in marked_messages], where)
            turns, following = _turns(
                [*((message, False) for message in first), *marked_messages], where
            )
            self._conversations.append(Conversation(turns, _tools(row, where), following))
        if cause and not self._conversations:
            raise ConfigError(f"{path} has no reply to train: {cause}")
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._conversations)
        self._conversations = self._conversations[:limit]

    def tasks(self) -> list[Conversation]:
        """Returns the conversations, in the order of the file unless they were shuffled."""
        return self._conversations

    def reset(self, task: Conversation) -> ResetResult:
        """Returns the messages before the first reply, and that reply."""
        first, *self._left = task.turns
        self._following = task.following
        return ResetResult(first.messages, task.tools, reply=first.reply)

    def step(self, reply: str) -> StepResult:
        """Returns the next turn, or reward 1 and what follows after the last turn.

        `reply` is the demonstrated reply of the previous turn, and is not read.
        """
        if not self._left:
            return StepResult(reward=1.0, messages=self._following)
        turn = self._left.pop(0)
        return StepResult(done=False, messages=turn.messages, reply=turn.reply)


def _told(
    row: question_files.Row,
    column: str,
    reply: str | None,
    where: str,
    *,
    is_recorded: bool,
) -> list[tuple[Message, bool]]:
    """Returns the messages of a row, each with whether it is a reply to train.

    A message that was recorded may be any text: a model has written it.
    """
    cell = question_files.cell_in(row, column, where)
    place = f"{where}: column {column!r}"
    question_files.check_read(
        row, {*question_files.UNREAD, *TRAINED, "loss_mask", "labels"} - {column, reply}, where
    )
    if reply is not None:
        right = Message(REPLY_ROLE, question_files.text_in(row, reply, where))
        return [
            *((message, False) for message in question_files.messages_in(cell, place)),
            (right, True),
        ]
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        cell = question_files.unpacked(cell, place)
    if not isinstance(cell, list):
        raise ConfigError(f"{place} must hold a list of messages")
    marked = [_message(entry, place, takes_any=is_recorded) for entry in cell]
    question_files.check_results([message for message, _ in marked], place)
    return marked


def _message(cell: question_files.Cell, where: str, *, takes_any: bool) -> tuple[Message, bool]:
    if not isinstance(cell, Mapping):
        return question_files.message_in(cell, where), False
    try:
        is_trained = trains(cell)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    fields = {name: value for name, value in cell.items() if name not in TRAINED}
    message = question_files.message_in(fields, where, takes_any=takes_any)
    if message.role != REPLY_ROLE:
        if any(map(cell.get, TRAINED)):
            raise ConfigError(f"{where}: only replies are trained, got a message of {message.role}")
        return message, False
    if is_trained and (message.tool_calls or message.reasoning):
        what = "tool_calls" if message.tool_calls else "reasoning"
        raise ConfigError(f"{where} holds {what}: write them into content as the model would")
    return message, is_trained


def _tools(row: question_files.Row, where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools in the column `tools`; raises ConfigError for what no template takes."""
    cell = row.get("tools")
    is_text = isinstance(cell, str)
    tools: Any = cell or []
    if isinstance(cell, str) and cell:
        tools = question_files.unpacked(cell, f"{where}: column 'tools'")
    try:
        if not is_text and holds_null(tools):
            raise ValueError("tools hold null, as parquet fills them: write JSON text")
        if tools:
            tools_json(tools)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return tuple(tools)


def _turns(
    marked_messages: Sequence[tuple[Message, bool]], where: str
) -> tuple[tuple[DemonstratedReply, ...], tuple[Message, ...]]:
    """Returns the turns up to the last trained reply, and the message that follows it.

    Raises ConfigError for an empty reply, a reply without a message before it, or no reply at all.
    """
    turns: list[DemonstratedReply] = []
    read: list[Message] = []
    for message, is_trained in marked_messages:
        if not is_trained:
            read.append(message)
            continue
        if not read or read[-1].role == REPLY_ROLE:
            raise ConfigError(f"{where}: a reply must follow a message, got two replies or none")
        if not isinstance(message.content, str) and len(message.content) > 1:
            raise ConfigError(f"{where}: a reply is a text, got {len(message.content)} parts")
        if not message.text.strip():
            raise ConfigError(f"{where}: a reply is empty")
        turns.append(DemonstratedReply(tuple(read), message.text))
        read = []
    if not turns:
        raise ConfigError(f"{where} has no message with role = {REPLY_ROLE!r}")
    return tuple(turns), tuple(read[:1])
