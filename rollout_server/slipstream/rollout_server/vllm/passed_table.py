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


def table_problems(table: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yields one line for each name and value in `rollout_server.engine` that vLLM refuses."""
    known = argument_types()
    for name, value in table.items():
        if name not in known:
            yield _unknown(name, known)
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
    # A type with alternatives has an error for each of them.
    path = _path(value, faults[0]["loc"])
    said = dict.fromkeys(each["msg"] for each in faults if _path(value, each["loc"]) == path)
    place, inner = ".".join([key, *path]), faults[0]["input"]
    return f"{place} = {inner!r} is refused by vLLM: {' or '.join(said)}"


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


def _unknown(name: str, known: Iterable[str]) -> str:
    near, hint = near_names(name, known), ""
    if near and near[0] in OWNED:
        hint = f"; {near[0]!r} cannot be passed through: {OWNED[near[0]]}"
    elif near:
        hint = f"; {did_you_mean(other for other in near if other not in OWNED)}"
    return f"unknown key {SECTION}.{name}{hint}"


def _choices(kind: Any) -> set[JsonValue]:  # noqa: ANN401 - any type
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return {_plain(part) for part in parts}
    return set().union(*map(_choices, parts))


def _plain(value: JsonValue) -> Any:  # noqa: ANN401 - strings are changed
    return value.lower().replace("-", "_") if isinstance(value, str) else repr(value)
