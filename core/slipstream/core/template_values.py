"""Checks the inputs of a chat template other than messages: named values, and tools.

A named value is, for example, `enable_thinking`. Tools come from environments, in the form of
OpenAI's function schemas.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, JsonValue
from slipstream.core.errors import ConfigError

# Values that servers set when they render a prompt, and values that would replace the template.
OWNED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation"}
    | {"documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"}
    | {"return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)
MAX_TOOLS = 128
NEED_PARSER = (
    "tools need rollout_server.tool_parser, the reader of the model's tool calls: set it in the "
    "run's configuration"
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_values(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns `values`; raises ConfigError for a name that the servers set themselves."""
    for name in values:
        if name in OWNED:
            raise ConfigError(f"chat_template_kwargs must not set {name!r}, which servers set")
    return values


def json_object(name: str, values: Mapping[str, JsonValue] | None, *, allow_nan: bool) -> str:
    """Returns `values` as JSON; raises ConfigError, with the argument's `name`, if it cannot."""

    def default(value: object) -> object:
        if (plain_value := plain(value)) is value:
            raise TypeError(f"{show(value)} is no value of JSON")
        return plain_value

    try:
        return json.dumps(dict(values or {}), allow_nan=allow_nan, default=default)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be a JSON object: {error}") from None


def plain(value: object) -> object:
    """Returns the number or text that a scalar of numpy or torch holds, or else `value`."""
    return cast(Any, value).item() if getattr(value, "shape", None) == () else value


def values_json(values: Mapping[str, JsonValue] | None) -> str:
    """Returns `values` as JSON text, or "" if empty. Raises ConfigError if they are invalid."""
    if not values:
        return ""
    check_values(dict(values))
    return json_object("chat_template_kwargs", values, allow_nan=False)


def read_object(name: str, text: str) -> dict[str, JsonValue]:
    """Returns the JSON object in `text`, {} for ""; raises ValueError, with `name`, for others."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a JSON object, got {text[:60]}")
    return parsed


def read_values(text: str) -> dict[str, JsonValue]:
    """Returns the values in a JSON text of `values_json`. Raises ValueError for other texts."""
    return check_values(read_object("chat_template_kwargs", text))


TemplateValues = Annotated[dict[str, JsonValue], AfterValidator(check_values)]


def tools_json(tools: object) -> str:
    """Returns function schemas as JSON; raises ValueError on the first that breaks a rule."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ValueError(f"tools must be a list of function schemas, got {show(tools)}")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools must be at most {MAX_TOOLS}, got {len(tools)}")
    names = [_checked_name(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"tools[{place}].function.name must be unique, got {name!r} again")
    try:
        return json.dumps(list(map(dict, tools)), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"tools must be JSON: {error}") from None


def read_tools(text: str) -> list[dict[str, JsonValue]]:
    """Returns the tools in a JSON text of `tools_json`. Raises ValueError for other texts."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tools must be JSON: {error}") from None
    tools_json(tools)
    read_tools: list[dict[str, JsonValue]] = tools
    return read_tools


def _checked_name(tool: object, where: str) -> str:
    """Checks a tool's schema and returns its name; a ValueError names the place `where`."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ValueError(f'{where} must be an object with type "function", got {show(tool)}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function must be an object, got {show(function)}")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        rule = "1 to 64 letters, digits and _.-"
        raise ValueError(f"{where}.function.name must be {rule}, got {show(name)}")
    if not isinstance(function.get("description", ""), str):
        what = show(function["description"])
        raise ValueError(f"{where}.function.description must be a text, got {what}")
    parameters = function.get("parameters", {"type": "object"})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        rule = 'a JSON schema with type "object"'
        raise ValueError(f"{where}.function.parameters must be {rule}, got {show(parameters)}")
    return name


def show(value: object) -> str:
    """Returns the start of a value's text, for an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_template(path: Path) -> str:
    """Returns the text of a chat template's file; raises ConfigError if it is empty or unread."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout_server.chat_template: {path}: {error}") from error
    if not text.strip():
        raise ConfigError(f"rollout_server.chat_template: {path} is empty")
    return text
