"""Checks of an environment's arguments; each raises ConfigError with the argument and the rule.

`filled` puts fields into texts, and `is_heldout` divides tasks into training and held-out tasks.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from slipstream.core.errors import ConfigError, did_you_mean, near_names

FIELD = re.compile(r"\{(\w+)\}")


def check_choice(argument: str, value: object, allowed: Iterable[str]) -> None:
    """Raises ConfigError, which names `argument`, if `value` is not in `allowed`."""
    if value not in (allowed := tuple(allowed)):
        raise ConfigError(f"{argument} must be one of {', '.join(allowed)}, got {value!r}")


def check_at_least(argument: str, value: int | None, least: int) -> None:
    """Raises ConfigError, which names `argument`, unless `value` is None or at least `least`."""
    if value is not None and type(value) is not int:
        raise ConfigError(f"{argument} must be a whole number, got {value!r}")
    if value is not None and value < least:
        raise ConfigError(f"{argument} must be at least {least}, got {value}")


def check_above_0(argument: str, value: float) -> None:
    """Raises ConfigError, which names `argument`, unless `value` is finite and above 0."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ConfigError(f"{argument} must be above 0, got {value!r}")


def check_texts(**values: object) -> None:
    """Raises ConfigError, which names the argument, for a value that is no text."""
    for argument, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{argument} must be a text, got {value!r}")


def check_holds(argument: str, text: str, field: str) -> None:
    """Raises ConfigError unless `text` contains the placeholder `field`, such as {question}."""
    if field not in text:
        raise ConfigError(f"{argument} must contain {field}, got {text!r}")


def check_filled(argument: str, texts: Iterable[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Raises ConfigError for a {NAME} that only some rows fill, or that is almost one's name.

    Other braces stay in a text as they are.
    """
    known = {name for row in rows for name in row}
    for name in dict.fromkeys(FIELD.findall("\n".join(texts))):
        lacking = [number for number, row in enumerate(rows, start=1) if name not in row]
        if name in known and lacking:
            raise ConfigError(f"{argument} names {{{name}}}, which row {lacking[0]} does not have")
        if name not in known and (near := near_names(name, known, cutoff=0.7)):
            raise ConfigError(f"{argument} names {{{name}}}; {did_you_mean(near)}")


def filled(text: str, fields: Mapping[str, object]) -> str:
    """Replaces each {NAME} that names a field by the field's value, as JSON unless it is a text."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in fields:
            return found[0]
        field = fields[found[1]]
        if isinstance(field, float) and field.is_integer():
            # Files write whole numbers so in a column of floats.
            field = int(field)
        return field if isinstance(field, str) else json.dumps(field, ensure_ascii=False)

    return FIELD.sub(value, text)


def is_heldout(task: str, one_in: int) -> bool:
    """Whether `task`, a text that identifies a task, is the one in `one_in` that is held out.

    A hash of the task decides, so that seed and order have no effect.
    """
    digest = hashlib.blake2b(task.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0
