"""Reads chat messages as files, environments and chat formats write them.

Every field is read or refused: `FIELDS` says what becomes of each.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from slipstream.client.environment import Message, ToolCall
from slipstream.core.errors import did_you_mean, near_names

# Where the fields of chat formats go: to the field of `Message` with this name.
FIELDS = {field.name: field.name for field in fields(Message)}
FIELDS |= dict.fromkeys(("reasoning_content", "thinking"), "reasoning")
# Whether a reply is trained, as OpenAI's and other formats for demonstrations write it.
TRAINED = ("weight", "train", "training", "trainable")
# The roles in which a field has a meaning; any other field has it in every role.
_ROLES = {"tool_calls": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}
# The fields of a call of a tool and of its function; `index` says no more than its place.
_CALL = ("id", "type", "function", "name", "arguments", "index")
# What files write for a field that a message does not have.
_ABSENT: tuple[object, ...] = (None, "", [], ())


def read_message(given: object) -> Message:
    """Returns the message that `given` is: a Message, or a mapping with the fields of `FIELDS`.

    Fields without a value do not count: parquet writes them where another row has one. Raises
    ValueError, which names the first field that is unknown or unusable.
    """
    if isinstance(given, Message):
        given = {field.name: getattr(given, field.name) for field in fields(Message)}
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys():
        raise ValueError(f"a message has role and content, got {show(given)}")
    found: dict[str, Any] = {"role": given["role"], "content": given["content"]}
    for name, value in given.items():
        if name in found or value in _ABSENT:
            continue
        if name in TRAINED:
            raise ValueError(f"the field {name!r} says what is trained, which demonstrations read")
        if name not in FIELDS:
            near = near_names(str(name), FIELDS)
            known = did_you_mean(near) if near else f"it has {', '.join(FIELDS)}"
            raise ValueError(f"a message has no field {name!r}; {known}")
        if found.setdefault(FIELDS[name], value) != value:
            raise ValueError(f"a message has {FIELDS[name]} by two names with different values")
    _check(found)
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = tuple(_call(call) for call in _listed(calls, "tool_calls"))
        found["content"] = found["content"] or ""
    if not isinstance(content := found["content"], str | Sequence) or isinstance(content, bytes):
        raise ValueError(f"content must be a text or a list of parts, got {show(content)}")
    return Message(**found)


def trains(message: Mapping[str, Any]) -> bool:
    """Whether a demonstration trains a reply, by the fields in `TRAINED`: all unless they say no.

    Raises ValueError for a value that is neither yes nor no.
    """
    said = {name: message[name] for name in TRAINED if message.get(name) is not None}
    for name, value in said.items():
        if value not in (0, 1):
            raise ValueError(f"{name} must be 0 or 1, got {show(value)}")
    return all(said.values())


def _check(found: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that is no text, or has no meaning in the message's role."""
    role = found["role"]
    for name in ("role", "name", "tool_call_id", "reasoning"):
        if name in found and not isinstance(found[name], str):
            raise ValueError(f"the {name} of a message must be a text, got {show(found[name])}")
    if not role:
        raise ValueError(f"the role of a message must be a text, got {show(role)}")
    for name, its in _ROLES.items():
        if name in found and role != its:
            raise ValueError(f"{name} stands in a message of role {its}, got role {role!r}")


def _call(given: object) -> ToolCall:
    if isinstance(given, ToolCall):
        _check_id(given.id)
        return given
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        raise ValueError(f"a call of a tool has a function with a name, got {show(given)}")
    assert isinstance(given, Mapping)
    for key, value in {**given, **function}.items():
        if key not in _CALL and value not in _ABSENT:
            raise ValueError(f"a call of a tool has no field {key!r}; it has {', '.join(_CALL)}")
    if given.get("type") not in (*_ABSENT, "function"):
        raise ValueError(f"the type of a call must be 'function', got {show(given['type'])}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, Mapping) and holds_null(arguments):
        raise ValueError(f"arguments of {name} hold null, as parquet fills them: write JSON text")
    if not isinstance(arguments, Mapping | str):
        raise ValueError(f"arguments of {name} must be an object or JSON text, got {arguments!r}")
    call_id = "" if given.get("id") is None else given["id"]
    _check_id(call_id)
    return ToolCall(call_id, name, arguments)


def _check_id(call_id: object) -> None:
    if not isinstance(call_id, str):
        raise ValueError(f"the id of a call must be a text, got {show(call_id)}")


def holds_null(value: object) -> bool:
    """Whether an object holds null, which parquet also writes for fields of other rows."""
    if isinstance(value, Mapping):
        return any(map(holds_null, value.values()))
    if isinstance(value, list):
        return any(map(holds_null, value))
    return value is None


def _listed(value: object, name: str) -> Sequence[object]:
    """Returns a list, which may be written as JSON text; raises ValueError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} must be a list, or one as JSON text: {error}") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list, got {show(value)}")
    return value


def show(value: object) -> str:
    """Returns the start of a value's text, for an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
