"""Checks settings of `rollout_server` against the installed vLLM's arguments and parsers."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import JsonValue, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from slipstream.core.errors import did_you_mean, near_names
from slipstream.core.settings.engine_table import OWNED, SECTION
from slipstream.core.settings.sections import RolloutServerSection
from vllm import AsyncEngineArgs
from vllm.engine import arg_utils
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

# Pydantic's words for a kind of value -> the words for a TOML file.
_WORDS = {
    "a valid boolean": "true or false",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid array": "a list",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
    "an object": "a table",
}


def table_problems(table: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yields one line for each name and value in `rollout_server.engine` that vLLM refuses."""
    known = argument_types()
    for name, value in table.items():
        if name not in known:
            yield _unknown(name, known, section=SECTION)
        elif problem := _value_problem(f"{SECTION}.{name}", value, known[name]):
            yield problem


def parser_problems(server: RolloutServerSection) -> Iterator[str]:
    """Yields one line for each parser of `rollout_server` that vLLM does not have."""
    for setting, name, known in (
        ("tool_parser", server.tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", server.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in known:
            near = near_names(name, known)
            hint = did_you_mean(near) if near else f"there are {', '.join(sorted(known))}"
            yield f"rollout_server.{setting} must be a parser of vLLM, got {name!r}; {hint}"


def argument_types() -> dict[str, Any]:
    """Returns the type of each of vLLM's engine arguments, by name.

    A type is None if vLLM imports it for type checkers only.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        if not field.init or field.name.startswith("_"):
            continue
        written = SimpleNamespace(__annotations__={field.name: field.type})
        try:
            found.update(get_type_hints(written, vars(arg_utils), include_extras=True))
        except NameError:
            found[field.name] = None
    return found


def _value_problem(key: str, value: JsonValue, kind: Any) -> str:  # noqa: ANN401 - any type
    """Returns why `value` is not of type `kind`, or "" if it is, or if only vLLM can check it."""
    if kind is None:
        return ""
    try:
        # In strict JSON mode a list may become a tuple, but "1" and true are not numbers.
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except PydanticSchemaGenerationError:
        return ""
    except ValidationError as error:
        return _describe(key, value, kind, error.errors(include_url=False))
    return ""


def _describe(
    key: str,
    value: JsonValue,
    kind: Any,  # noqa: ANN401 - any type
    errors: Sequence[ErrorDetails],
) -> str:
    # vLLM accepts the members of its enumerations, and most of its words, in any spelling.
    faults = [each for each in errors if each["type"] != "enum"]
    if not faults or _plain(value) in _choices(kind):
        return ""
    first, path = faults[0], _path(value, faults[0]["loc"])
    inner, place = first["input"], ".".join([key, *path])
    if first["type"] == "unexpected_keyword_argument":
        return _unknown(path[-1], _fields(kind, path[:-1]), section=".".join([key, *path[:-1]]))
    if first["type"] in ("value_error", "assertion_error"):
        return f"{place} = {inner!r} is refused by vLLM: {first['msg'].partition(', ')[2]}"
    # A type with alternatives has an error for each of them.
    messages = [each["msg"] for each in faults if _path(value, each["loc"]) == path]
    words = dict.fromkeys(message.removeprefix("Input should be ") for message in messages)
    return f"{place} must be {' or '.join(_WORDS.get(each, each) for each in words)}, got {inner!r}"


def _path(value: JsonValue, location: Sequence[str | int]) -> list[str]:
    """Returns the leading part of pydantic's `location` that indexes into `value`.

    The rest names alternatives of a union.
    """
    found: list[str] = []
    inner: Any = value
    for part in location:
        try:
            inner = inner[part]
        except (KeyError, IndexError, TypeError):
            break
        found.append(str(part))
    return found


def _unknown(name: str, known: Iterable[str], *, section: str) -> str:
    near = near_names(name, known)
    owned = OWNED if section == SECTION else {}
    hint = ""
    if near and near[0] in owned:
        hint = f"; {near[0]!r} cannot be passed through: {owned[near[0]]}"
    elif near:
        hint = f"; {did_you_mean(other for other in near if other not in owned)}"
    return f"unknown key {section}.{name}{hint}"


def _fields(kind: Any, path: Sequence[str]) -> Mapping[str, Any]:  # noqa: ANN401 - any type
    """Returns field types, by name, of the settings class at `path` inside type `kind`."""
    owner = next((each for each in (kind, *get_args(kind)) if dataclasses.is_dataclass(each)), None)
    fields = {name: f.annotation for name, f in getattr(owner, "__pydantic_fields__", {}).items()}
    return _fields(fields.get(path[0]), path[1:]) if path else fields


def _choices(kind: Any) -> set[JsonValue]:  # noqa: ANN401 - any type
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return {_plain(part) for part in parts}
    return set().union(*map(_choices, parts))


def _plain(value: JsonValue) -> Any:  # noqa: ANN401 - strings are changed
    return value.lower().replace("-", "_") if isinstance(value, str) else repr(value)
