"""Values that a chat template takes by name, as `enable_thinking` is."""

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, JsonValue
from slipstream.core.errors import ConfigError

# What servers render prompts with themselves, and what would take the template's place.
_OWNED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation"}
    | {"documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"}
    | {"return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)


def check_values(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns `values`. Raises ValueError for a name that no setting may have."""
    for name in values:
        if name in _OWNED:
            raise ValueError(f"chat_template_kwargs must not set {name!r}, which servers set")
    return values


def values_json(values: Mapping[str, JsonValue]) -> str:
    """Returns `values` as they travel, "" for none. Raises ConfigError if they cannot."""
    if not values:
        return ""
    try:
        text = json.dumps(dict(values), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"chat_template_kwargs must be a JSON object: {error}") from None
    try:
        read_values(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return text


def read_values(text: str) -> dict[str, JsonValue]:
    """Returns the values in a JSON text. Raises ValueError if it is no object of such values."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"chat_template_kwargs must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"chat_template_kwargs must be a JSON object, got {text[:60]}")
    return check_values(found)


TemplateValues = Annotated[dict[str, JsonValue], AfterValidator(check_values)]
