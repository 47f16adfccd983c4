"""Checks settings of `rollout_server` against the installed vLLM's arguments and parsers."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import JsonValue, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from slipstream.core.errors import did_you_mean, near_names
from slipstream.core.settings.engine_table import OWNED, SECTION
from slipstream.core.settings.sections import RolloutServerSection
from vllm import AsyncEngineArgs
from vllm.engine import arg_utils
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager


def table_problems(table: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yields one line for each name and value in `rollout_server.engine` that vLLM refuses."""
    kinds = argument_types()
    for name, value in table.items():
        if name in kinds:
            if problem := _value_problem(f"{SECTION}.{name}", value, kinds[name]):
                yield problem
            continue
        near = near_names(name, kinds)
        hint = ""
        if near and near[0] in OWNED:
            hint = f"; {near[0]!r} cannot be passed through: {OWNED[near[0]]}"
        elif near:
            hint = f"; {did_you_mean(other for other in near if other not in OWNED)}"
        yield f"unknown key {SECTION}.{name}{hint}"


def parser_problems(server: RolloutServerSection) -> Iterator[str]:
    """Yields one line for each parser of `rollout_server` that vLLM does not have."""
    for setting, name, parsers in (
        ("tool_parser", server.tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", server.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in parsers:
            near = near_names(name, parsers)
            hint = did_you_mean(near) if near else f"there are {', '.join(sorted(parsers))}"
            yield f"rollout_server.{setting} must be a parser of vLLM, got {name!r}; {hint}"


def argument_types() -> dict[str, Any]:
    """Returns the type of each of vLLM's engine arguments, by name.

    A type is None if vLLM imports it for type checkers only.
    """
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        if not field.init or field.name.startswith("_"):
            continue
        written = SimpleNamespace(__annotations__={field.name: field.type})
        try:
            kinds.update(get_type_hints(written, vars(arg_utils), include_extras=True))
        except NameError:
            kinds[field.name] = None
    return kinds


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
        errors = error.errors(include_url=False)
        # vLLM takes its enumerations and most of its words in any spelling, and refuses others.
        faults = [fault for fault in errors if fault["type"] not in ("enum", "literal_error")]
        if faults and (len(faults) == len(errors) or not isinstance(value, str)):
            place = ".".join(map(str, faults[0]["loc"]))
            where = f"{key} ({place})" if place else key
            return f"{where} = {faults[0]['input']!r} is refused by vLLM: {faults[0]['msg']}"
    return ""
