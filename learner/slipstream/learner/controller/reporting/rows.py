"""The lines of metrics.jsonl, one after the other: a long run has more of them than fit memory."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.learner.controller.records.journal import whole_bytes
from slipstream.learner.controller.reporting.result_files import Tell, set_aside
from slipstream.protocol.errors import ProtocolError
from slipstream.protocol.run_folder import rename_aside

METRICS = "metrics.jsonl"
SAMPLES = "trajectories.jsonl"
# What the line of a step has at least; curves are drawn of it.
COLUMNS = (
    *("step", "reward_mean", "lag_mean", "lag_max"),
    *("generated_tokens_per_s", "trained_tokens_per_s"),
)
# No run has more steps, and each takes a byte of memory.
MAX_STEP = 10**8

# The object of a whole line; None: the line is damaged.
Parse: TypeAlias = Callable[[bytes], object | None]


def parse_object(line: bytes) -> dict[str, JsonValue] | None:
    """The JSON object of a line; None: it holds none."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_row(line: bytes) -> dict[str, float] | None:
    """The numbers of a line of metrics.jsonl; None: it is none that a run writes."""
    found = parse_object(line)
    if found is None:
        return None
    row: dict[str, float] = {}
    for name, value in found.items():
        if value is not None and not isinstance(value, (int, float)):
            return None
        try:
            row[name] = math.nan if value is None else float(value)
        except OverflowError:
            return None
    if not math.isfinite(row.get("wall_s", math.nan)):
        return None
    if "step" in row and not (1 <= row["step"] <= MAX_STEP and row.keys() >= set(COLUMNS)):
        return None
    return row


def keep_whole_lines(path: Path, parse: Parse, tell: Tell) -> None:
    """Takes away a last line that a crash tore; leaves nothing but whole lines in the file.

    A file that is damaged in another way, or may not be read and written, is set aside and told.
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
    """Sets a file aside whose line `damaged` is the first one that is not whole."""
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
    """The numbers of each line; none when there is no such file.

    ProtocolError naming the first line that is damaged.
    """
    if not path.exists():
        return
    for number, line in enumerate(_lines(path), start=1):
        row = parse_row(line)
        if row is None:
            raise ProtocolError(f"{path}: line {number} is damaged")
        yield row
