"""Reads and writes the result files of a run.

No decision depends on these files, so a fault causes a warning and does not end the run.
metrics.jsonl is read line by line, since a long run's file does not fit into memory.
"""

import contextlib
import json
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.core.regular_files import open_regular
from slipstream.learner.controller.records.journal import whole_bytes

# Takes a warning about a file, in one line.
Tell: TypeAlias = Callable[[str], None]

# Columns that the row of every step has.
COLUMNS = (
    *("step", "reward_mean", "lag_mean", "lag_max"),
    *("generated_tokens_per_s", "trained_tokens_per_s"),
)
# Largest step; the recorder needs a byte of memory for each.
MAX_STEP = 10**8
# No run writes a larger number; sums of such numbers would overflow.
MAX_NUMBER = 1e30


class ResultFile:
    """A file to which whole records are appended; a record that cannot be written is lost.

    The first lost record causes a warning. The next record that can be written causes another
    warning, with the number of lost records. Each record opens the file, so a removed file is
    created again.
    """

    def __init__(self, path: Path, tell: Tell) -> None:
        """Opens the file; `tell` gets the warnings."""
        self._path, self._tell = path, tell
        self._num_lost = 0
        self.append(b"")

    def append(self, record: bytes) -> None:
        """Writes one record whole, or counts it as lost."""
        try:
            with open_regular(self._path, "ab", buffering=0) as file:
                size, left = file.tell(), record
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(size)
                    raise
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
        """Warns of the records that were lost since the last successful write, if any."""
        if self._num_lost:
            self._tell(f"{self._path}: the last {self._num_lost} records were lost")
            self._num_lost = 0


def write_result(path: Path, data: bytes, tell: Tell) -> None:
    """Replaces a whole file; on an error the old file stays, and `tell` gets a warning."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(data)
        partial.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        tell(f"{path} cannot be written: {error.strerror}")


def parse_object(line: bytes) -> dict[str, JsonValue] | None:
    """Returns the JSON object of a line, or None if the line is not a JSON object."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_row(line: bytes) -> dict[str, float] | None:
    """Returns the numbers of a line of metrics.jsonl, or None if the line is invalid.

    A null becomes NaN.
    """
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
    if (step := row.get("step")) is None:
        return row
    is_step = (
        step.is_integer()
        and 1 <= step <= MAX_STEP
        and ("passes" in row or row.keys() >= set(COLUMNS))
    )
    return row if is_step else None


def drop_torn_line(path: Path, tell: Tell) -> None:
    """Removes an incomplete last line, left by a crash, so that the file ends with a whole line."""
    if not path.is_file():
        return
    try:
        with open_regular(path, "r+b") as file:
            file.truncate(whole_bytes(path))
    except OSError as error:
        tell(f"{path} cannot be read: {error.strerror}")


def drop_unfinished_step(path: Path, version: int, tell: Tell) -> None:
    """Removes the last lines of a file if they are of the step that makes `version`.

    The row of that step is missing: a crash came between. The lines are written again with it.
    """
    drop_torn_line(path, tell)
    if not path.is_file() or not path.stat().st_size:
        return
    with open_regular(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end, number = len(data), 0
            while end:
                start = data.rfind(b"\n", 0, end - 1) + 1
                line = parse_object(data[start:end])
                if line is None or line.get("step") != version:
                    break
                end, number = start, number + 1
        file.truncate(end)
    if number:
        tell(
            f"{path}: the last {number} lines are of step {version}, which has no row: they are "
            "removed, and come again if it is trained again"
        )


def read_rows(path: Path, tell: Tell = lambda _: None) -> Iterator[dict[str, float]]:
    """Yields the numbers of each line of metrics.jsonl; yields nothing if the file is missing.

    Damaged lines are skipped; one call of `tell` then names the first damaged line and their
    number.
    """
    if not path.is_file():
        return
    damaged: list[int] = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if (row := parse_row(line)) is not None:
                    yield row
                else:
                    damaged.append(number)
    except OSError as error:
        tell(f"{path} cannot be read: {error.strerror}")
    if damaged:
        tell(f"{path}: line {damaged[0]} is damaged; {len(damaged)} such lines are passed over")
