"""Chat messages in a form that can be compared: those a client sends with those it was sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ASSISTANT = "assistant"


class MessageKey(NamedTuple):
    """A message without what a client may write in several ways.

    Text in one part equals plain text, no text equals empty text, and the arguments of a tool call
    are compared as JSON. In a reply a part that is white space alone equals no part: streams have
    it before a call of a tool, and clients drop it. `reasoning` is None where a message has none.
    """

    role: str
    text: str | tuple[str, ...]
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str | None = None


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Returns the key of a message in the form of OpenAI's chat completions."""
    role = str(message.get("role", ""))
    return MessageKey(
        role=role,
        text=_text(message.get("content"), is_reply=role == ASSISTANT),
        tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
        tool_call_id=str(message.get("tool_call_id") or ""),
        name=str(message.get("name") or ""),
        reasoning=message.get("reasoning") or message.get("reasoning_content") or None,
    )


def reply_keys(messages: Sequence[Mapping[str, Any]]) -> list[tuple[MessageKey, ...]]:
    """Returns for each message of a reply the keys under which a client may send it back.

    Clients may leave the reasoning out.
    """
    found: list[tuple[MessageKey, ...]] = []
    for message in messages:
        key = message_key(message)
        whole = key.reasoning is None
        found.append((key,) if whole else (key, key._replace(reasoning=None)))
    return found


def _text(content: str | Iterable[Any] | None, *, is_reply: bool) -> str | tuple[str, ...]:
    given = [content] if isinstance(content, str) else content or ()
    parts = tuple(_part(part) for part in given)
    if is_reply:
        parts = tuple(part for part in parts if part.strip())
    if not parts:
        return ""
    return parts[0] if len(parts) == 1 else parts


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    # The zero character keeps a picture apart from a text that spells it.
    return "\0" + json.dumps(part, sort_keys=True, default=str)


def _tool_call(call: Mapping[str, Any]) -> tuple[str, str, str]:
    function = call.get("function") or {}
    return (
        str(call.get("id") or ""),
        str(function.get("name") or ""),
        _arguments(function.get("arguments")),
    )


def _arguments(arguments: object) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return "\0" + str(arguments)
    return json.dumps(arguments if arguments is not None else {}, sort_keys=True)
