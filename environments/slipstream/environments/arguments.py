"""Checks the texts among an environment's arguments; ConfigError has the argument and the rule.

`filled` puts fields into texts, and `is_heldout` divides tasks into training and held-out tasks.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from slipstream.core.errors import ConfigError, did_you_mean, near_names
from slipstream.core.template_values import plain, show

FIELD = re.compile(r"\{(\w+)\}")


def check_holds(argument: str, text: str, field: str) -> None:
    """Raises ConfigError unless `text` contains the placeholder `field`, such as {question}."""
    if field not in text:
        raise ConfigError(f"{argument} must contain {field}, got {text!r}")


def check_filled(argument: str, texts: Iterable[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Raises ConfigError for a {NAME} that only some rows fill, or that is almost one's name.

    Other braces stay in a text as they are. So it does for a field that is no value of JSON.
    """
    columns = {name for row in rows for name in row}
    for name in dict.fromkeys(FIELD.findall("\n".join(texts))):
        lacking = [number for number, row in enumerate(rows, start=1) if name not in row]
        if name in columns and lacking:
            raise ConfigError(f"{argument} names {{{name}}}, which row {lacking[0]} does not have")
        for number, row in enumerate(rows, start=1):
            try:
                filled(f"{{{name}}}", row)
            except (TypeError, ValueError) as error:
                what = f"{argument} names {{{name}}}, which row {number} has as {show(row[name])}"
                raise ConfigError(f"{what}: write its text") from error
        if name not in columns and (near := near_names(name, columns, cutoff=0.7)):
            raise ConfigError(f"{argument} names {{{name}}}; {did_you_mean(near)}")


def filled(text: str, fields: Mapping[str, object]) -> str:
    """Replaces each {NAME} that names a field by the field's value, as JSON unless it is a text."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            return match[0]
        field = plain(fields[match[1]])
        if isinstance(field, float | Decimal) and math.isfinite(field) and field == int(field):
            # Files write whole numbers so in a column of floats.
            field = int(field)
        is_text = isinstance(field, str | Decimal)
        return str(field) if is_text else json.dumps(field, ensure_ascii=False)

    return FIELD.sub(value, text)


def is_heldout(task: str, one_in: int) -> bool:
    """Whether `task`, a text that identifies a task, is the one in `one_in` that is held out.

    A hash of the task decides, so that seed and order have no effect.
    """
    digest = hashlib.blake2b(task.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0
