"""Files of results, and the repair of those that a crash tore.

No decision depends on them, so that a fault is a warning and ends no run. metrics.jsonl is read
line by line, as that of a long run does not fit into memory.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.core.errors import ProtocolError
from slipstream.core.run_folder import rename_aside
from slipstream.learner.controller.records.journal import whole_bytes

# Takes a warning about a file, in one line.
Tell: TypeAlias = Callable[[str], None]


class ResultFile:
    """A file that grows by whole records. A fault is one warning, and the number of lost records.

    Each record opens the file again, so that a removed file is created again.
    """

    def __init__(self, path: Path, tell: Tell, *, header: bytes = b"") -> None:
        """`header` is written first into an empty file. What is no file at `path` is renamed."""
        self._path, self._tell, self._header = path, tell, header
        self._num_lost = 0
        is_broken_link = path.is_symlink() and not path.resolve().parent.is_dir()
        if is_broken_link or (path.exists() and not path.is_file()):
            set_aside(path, tell)
        self.append(b"")

    def append(self, record: bytes) -> None:
        """Writes one record whole, or counts it as lost."""
        try:
            with self._path.open("ab", buffering=0) as file:
                size = file.tell()
                _write_whole(file, record if size else self._header + record, size)
        except OSError as error:
            if not self._num_lost:
                text = f"{self._path} cannot be written: {error.strerror}"
                self._tell(f"{text}; what comes is lost until it can")
            self._num_lost += bool(record)
            return
        if self._num_lost and record:
            self._tell(f"{self._path} is written again; {self._num_lost} records were lost")
            self._num_lost = 0

    def close(self) -> None:
        """Warns of records that were lost since the last write."""
        if self._num_lost:
            self._tell(f"{self._path}: the last {self._num_lost} records were lost")
            self._num_lost = 0


def _write_whole(file: FileIO, record: bytes, size: int) -> None:
    """Appends `record` to a file of `size` bytes, which it keeps on OSError."""
    try:
        while record:
            record = record[file.write(record) :]
    except OSError:
        file.truncate(size)
        raise


def set_aside(path: Path, tell: Tell) -> None:
    """Renames anything that is in the place of a file, with a warning."""
    aside = rename_aside(path)
    tell(f"{path} is no file that can be written; what was there lies in {aside.name} now")


def remove_old(path: Path, tell: Tell) -> None:
    """Removes the file of an earlier start; a folder in its place is renamed."""
    if path.is_dir() and not path.is_symlink():
        set_aside(path, tell)
    else:
        path.unlink(missing_ok=True)


def write_result(path: Path, data: bytes, tell: Tell) -> bool:
    """Writes a whole file; on an error keeps the old file and warns. Returns if it was written."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(data)
        partial.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        tell(f"{path} cannot be written: {error.strerror}")
        return False
    return True


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
    """The JSON object of a line. None if the line holds none."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_row(line: bytes) -> dict[str, float] | None:
    """The numbers of a line of metrics.jsonl. None if no run writes such a line."""
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

    Raises ProtocolError for the first damaged line.
    """
    if not path.exists():
        return
    for number, line in enumerate(_lines(path), start=1):
        row = parse_row(line)
        if row is None:
            raise ProtocolError(f"{path}: line {number} is damaged")
        yield row
