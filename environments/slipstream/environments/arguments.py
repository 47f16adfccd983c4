"""Checks the texts among an environment's arguments; ConfigError has the argument and the rule.

`filled` puts fields into texts, and `is_heldout` divides tasks into training and held-out tasks.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from slipstream.core.errors import ConfigError, did_you_mean, near_names

FIELD = re.compile(r"\{(\w+)\}")


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
