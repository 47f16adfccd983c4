"""The names of metrics in docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
NAME = re.compile(r"`([^`]+)`")


def tables(heading: str) -> list[list[str]]:
    """The names in the first column of each table below a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found: list[list[str]] = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        cells = [line.split("|")[1] for line in block.splitlines()[2:]]
        found.append([name for cell in cells for name in NAME.findall(cell)])
    return found
