"""The names of metrics in docs/metrics.md, and of the fields of kept episodes."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
NAME = re.compile(r"`([^`]+)`")
CHOICE = re.compile(r"\{([^{}]*)\}")


def tables(heading: str, page: str = "metrics.md") -> list[list[str]]:
    """The names in the first column of each table below a heading."""
    section = (
        (DOCS / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    )
    rows: list[list[str]] = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        cells = [line.split("|")[1] for line in block.splitlines()[2:]]
        rows.append(
            [
                one
                for cell in cells
                for name in NAME.findall(cell)
                for one in names(name)
            ]
        )
    return rows


def names(family: str) -> list[str]:
    """The names that `prefix_{a,b}` stands for, in their order."""
    match = CHOICE.search(family)
    if not match:
        return [family]
    before = family[: match.start()]
    after = family[match.end() :]
    return [
        name for part in match[1].split(",") for name in names(before + part + after)
    ]
