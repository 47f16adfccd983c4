"""Writes the tables of docs/guides/migration.md from the names that the product explains.

    python docs/generate_migration.py

A table stands between two comments: `names TRAINER`, and `end of names`.
"""

import re
import sys
from pathlib import Path

from slipstream.core.configuration.foreign_names import ForeignName, foreign_names

PAGE = Path(__file__).parent / "guides" / "migration.md"
BLOCK = re.compile(r"(<!-- names (.+?) -->\n).*?(<!-- end of names -->)", re.DOTALL)


def written(page: str) -> str:
    """Returns the text of the page with each table as it is today."""
    return BLOCK.sub(lambda block: f"{block[1]}{table(block[2])}{block[3]}", page)


def trainers(page: str) -> list[str]:
    """Returns the names of the trainers that have a table on the page."""
    return [block[2] for block in BLOCK.finditer(page)]


def table(trainer: str) -> str:
    """Returns the table of a trainer's names in Markdown."""
    rows = [row for row in foreign_names() if row.trainer == trainer]
    if not rows:
        raise SystemExit(f"{PAGE}: no names of {trainer!r} are known")
    lines = [f"| {trainer} | Slipstream | |", "|---|---|---|", *map(line, rows)]
    return "".join(f"{text}\n" for text in lines)


def line(row: ForeignName) -> str:
    """Returns one row of a table."""
    settings = ", ".join(f"`{setting}`" for setting in row.settings)
    # A bar would end the cell.
    note = row.note.replace("|", "\\|")
    return f"| `{row.name}` | {settings or '-'} | {note} |"


if __name__ == "__main__":
    text = written(PAGE.read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        sys.exit(int(text != PAGE.read_text(encoding="utf-8")))
    PAGE.write_text(text, encoding="utf-8")
