"""Reads and repairs metrics.jsonl line by line, as those of a long run do not fit into memory."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.run_folder import rename_aside
from slipstream.learner.controller.records.journal import whole_bytes
from slipstream.learner.controller.reporting.result_files import Tell, set_aside

# Columns that the row of every step has.
COLUMNS = (
    *("step", "reward_mean", "lag_mean", "lag_max"),
    *("generated_tokens_per_s", "trained_tokens_per_s"),
)
# Largest step; the recorder needs a byte of memory for each.
MAX_STEP = 10**8
# Larger numbers no run writes; sums of them would overflow.
MAX_NUMBER = 1e30

# Parses a line; returns None when it is damaged.
Parse: TypeAlias = Callable[[bytes], object | None]


def parse_object(line: bytes) -> dict[str, JsonValue] | None:
    """The JSON object of a line; None when the line is none."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_row(line: bytes) -> dict[str, float] | None:
    """The numbers of a line of metrics.jsonl; None when no run writes such a line."""
    found = parse_object(line)
    if found is None:
        return None
    row: dict[str, float] = {}
    for name, value in found.items():
        if value is None:
            # A number that was not finite.
            row[name] = math.nan
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if not -MAX_NUMBER <= value <= MAX_NUMBER:
            return None
        row[name] = float(value)
    if math.isnan(row.get("wall_s", math.nan)):
        return None
    return row if "step" not in row or _is_step(row) else None


def _is_step(row: Mapping[str, float]) -> bool:
    step = row["step"]
    return step.is_integer() and 1 <= step <= MAX_STEP and row.keys() >= set(COLUMNS)


def keep_whole_lines(path: Path, parse: Parse, tell: Tell) -> None:
    """Removes a last line that a crash tore, so that the file has only whole lines.

    If other lines are damaged, or the file cannot be read and written, it is renamed and `tell` is
    called; the whole lines of a damaged file are kept.
    """
    if not path.is_file():
        return
    try:
        with path.open("r+b") as file:
            file.truncate(whole_bytes(path))
        damaged = next((n for n, line in enumerate(_lines(path), 1) if parse(line) is None), 0)
    except OSError:
        set_aside(path, tell)
        return
    if damaged:
        _salvage(path, damaged, parse, tell)


def _salvage(path: Path, damaged: int, parse: Parse, tell: Tell) -> None:
    """Renames a file whose first damaged line is `damaged`; keeps its whole lines in a new file."""
    partial = path.with_name(f"{path.name}.partial")
    num_kept, lost = 0, ""
    try:
        with partial.open("wb") as kept:
            for line in _lines(path):
                if parse(line) is not None:
                    kept.write(line)
                    num_kept += 1
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        num_kept, lost = 0, f": {error.strerror}"
    aside = rename_aside(path)
    if not lost:
        partial.rename(path)
    tell(
        f"{path}: line {damaged} is damaged; the file lies in {aside.name} now, and its "
        f"{num_kept} whole lines were kept{lost}"
    )


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """Yields the numbers of each line; nothing when there is no such file.

    ProtocolError names the first damaged line.
    """
    if not path.exists():
        return
    for number, line in enumerate(_lines(path), start=1):
        row = parse_row(line)
        if row is None:
            raise ProtocolError(f"{path}: line {number} is damaged")
        yield row
