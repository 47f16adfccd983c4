"""Reads the feature table: what is promised, which tests show it, and which lines they guard.

`tests/parity/feature-parity.toml` is the source; `python tests/mutants/table.py` prints the page
that is made of it.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "parity" / "feature-parity.toml"
PAGE = ROOT / "tests" / "parity" / "feature-parity.md"

INTRODUCTION = """\
# Feature parity

What engineers expect from a Megatron-based reinforcement-learning trainer, drawn from the documents
of SkyRL, siiRL, Oumi and Trinity-RFT. Each of its 62 rows has an item of theirs, our setting or
command for it, and the tests that show it. Features beyond these items are not listed.

A test counts only if it fails when the code that it is about is taken away. `make mutants` takes
that code away, one place after the other, and runs the tests of the row: each must be noticed.

`python tests/mutants/table.py` makes this page from `tests/parity/feature-parity.toml`; a test
compares both.

| | feature | setting or command | shown by | guarded places |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Mutant:
    """One change of the code that a test must notice: `find` stands once in `file`."""

    file: str
    find: str
    replace: str
    # The tests of the row that must notice the change; empty: all of them.
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file and the first line that is changed."""
        return f"{self.file}: {self.find.strip().splitlines()[0].strip()}"


@dataclass(frozen=True)
class Row:
    """One feature; either tests or a reason why there are none."""

    item: int
    feature: str
    setting: str
    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    reason: str

    @classmethod
    def read(cls, entry: dict) -> Row:
        mutants = tuple(
            Mutant(m["file"], m["find"], m["replace"], tuple(m.get("tests", [])))
            for m in entry.get("mutants", [])
        )
        return cls(
            item=entry["item"],
            feature=entry["feature"],
            setting=entry.get("setting", ""),
            tests=tuple(entry.get("tests", [])),
            mutants=mutants,
            reason=entry.get("reason", ""),
        )


def rows() -> list[Row]:
    """All rows, in the order of their numbers."""
    entries = tomllib.loads(TABLE.read_text())["row"]
    return sorted((Row.read(entry) for entry in entries), key=lambda row: row.item)


def page() -> str:
    """The page that describes the rows."""
    lines = []
    for row in rows():
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        shown = "<br>".join(part for part in (tests, row.reason) if part)
        places = "<br>".join(
            f"`{file}`" for file in dict.fromkeys(m.file for m in row.mutants)
        )
        lines.append(
            f"| {row.item} | {row.feature} | {row.setting} | {shown} | {places} |\n"
        )
    return INTRODUCTION + "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
