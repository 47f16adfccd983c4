"""Names that settings have in other trainers and had in earlier releases, beside ours.

An unknown setting is often a name that a user brings along. A guess by its letters would be wrong
more often than right: all trainers name the same fifty ideas with the same twenty words.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("foreign_names.toml")
# The table of names that no single trainer has.
COMMON = "the field"
# The table of our own settings that went.
EARLIER_RELEASE = "an earlier Slipstream"
# Most meanings of one name that a message lists.
MAX_MEANINGS = 3


@dataclass(frozen=True)
class ForeignName:
    """A setting of another trainer, and what stands for it here."""

    trainer: str
    name: str
    # Our settings, with dots; () if none is the counterpart.
    settings: tuple[str, ...]
    # Further facts that a user must know, such as why there is no setting.
    note: str

    @property
    def parts(self) -> tuple[str, ...]:
        return _parts(self.name)

    @property
    def owner(self) -> str:
        """Whose name it is, as a possessive, or "" for a name that many use."""
        if self.trainer == COMMON:
            return ""
        return f"{self.trainer}'s "

    @property
    def meaning(self) -> str:
        """Says, as a clause, what the setting is here."""
        if not self.settings:
            return f"has no setting here: {self.note}"
        further = f" ({self.note})" if self.note else ""
        return f"is {', '.join(self.settings)} here{further}"


@cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Returns all names of foreign_names.toml, in its order."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    names: list[ForeignName] = []
    for trainer, rows in tables.items():
        for name, value in rows.items():
            settings, _, note = value.partition("--")
            ours = [setting.strip() for setting in settings.split(",") if setting.strip()]
            names.append(
                ForeignName(
                    trainer,
                    name,
                    tuple(ours),
                    note.strip(),
                )
            )
    return tuple(names)


def explain(key: str) -> str:
    """Returns what the unknown setting `key`, with dots, is in other trainers, or "" if unknown.

    Names are compared from their last part on; those that agree in most parts count, and of these
    the ones whose counterpart is in the table of `key`. A name with more than three meanings, such
    as `enabled`, has none.
    """
    parts = _parts(key)
    table = f"{parts[0]}."
    rows = _matching(parts)
    in_table = [row for row in rows if any(name.startswith(table) for name in row.settings)]
    # The first trainer with a meaning stands for all that have it.
    meanings: dict[object, ForeignName] = {}
    for row in in_table or rows:
        meanings.setdefault(row.settings or row.note, row)
    if not 0 < len(meanings) <= MAX_MEANINGS:
        return ""
    return "; ".join(f"{row.owner}{row.name} {row.meaning}" for row in meanings.values())


def is_former(key: str) -> bool:
    """Whether `key` is a setting that an earlier release had, or lies in a table that it had."""
    parts = _parts(key)
    former = [row.parts for row in foreign_names() if row.trainer == EARLIER_RELEASE]
    return any(parts[: len(name)] == name for name in former)


def settings_for(key: str) -> frozenset[str]:
    """Returns all of our settings that may stand for the unknown setting `key`."""
    settings: set[str] = set()
    for row in _matching(_parts(key)):
        settings.update(row.settings)
    return frozenset(settings)


def _matching(parts: tuple[str, ...]) -> list[ForeignName]:
    scores = {row: _agreement(parts, row.parts) for row in foreign_names()}
    best = max(scores.values())
    if not best:
        return []
    return [row for row, score in scores.items() if score == best]


def _agreement(typed: tuple[str, ...], name: tuple[str, ...]) -> int:
    """Returns by how much two dotted names agree: 2 for each equal part, from the last one on.

    1 is for a last part that ends with the typed one, as `ppo_mini_batch_size` does with
    `mini_batch_size`.
    """
    if name == typed[: len(name)]:
        # A table that is gone, with a setting in it.
        return 2 * len(name)
    equal_parts = 0
    for ours, theirs in zip(reversed(typed), reversed(name), strict=False):
        if ours != theirs:
            break
        equal_parts += 1
    if equal_parts:
        return 2 * equal_parts
    last_part = typed[-1]
    return int("_" in last_part and name[-1].endswith(f"_{last_part}"))


def _parts(name: str) -> tuple[str, ...]:
    without_numbers = re.sub(r"\.\d+(?=\.|$)", "", name.removeprefix("--"))
    normalised = without_numbers.lower().replace("-", "_")
    return tuple(normalised.split("."))
