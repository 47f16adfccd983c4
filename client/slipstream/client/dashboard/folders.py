"""Reads the folders of runs, into which the runs may still be writing."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.run_folder import METRICS, SAMPLES, SUMMARY, SUSPENDED, log_path

# Largest part of a file in one answer; the page asks for the rest in further calls.
MOST_BYTES = 4 << 20
MOSTSAMPLES = 256
_TAIL_BYTES = 64 << 10
# Number of steps that no run has.
_MOST_STEPS = 10**12


class UnknownRun(LookupError):
    """There is no run of that name."""


@dataclass(frozen=True)
class Part:
    """Complete lines of a JSON-lines file, read from a given byte on.

    `end` is the byte after the last line. `is_all`: the file had no more bytes to read.
    """

    rows: list[dict[str, Any]]
    end: int
    is_all: bool


class RunFolders:
    """The runs below a folder, or the one run that the folder is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """Returns the names of runs that have written metrics, the newest first."""
        found = [self._folder] if _is_run(self._folder) else self._children()
        found.sort(key=_written_s, reverse=True)
        return [folder.name for folder in found]

    def overview(self) -> list[dict[str, Any]]:
        """Returns a table for each run: its name, when it last wrote, and its summary if it ended.

        The table of a run that has not ended has only its suspended environments.
        """
        lines = []
        for name in self.names():
            folder = self._of(name)
            line = {"name": name, "written_s": _written_s(folder)}
            suspended = {"suspended_environments": _table(folder / SUSPENDED)}
            lines.append(line | suspended | _table(folder / SUMMARY))
        return lines

    def metrics(self, name: str, begin: int) -> Part:
        """Returns rows of metrics.jsonl from byte `begin` on; UnknownRun."""
        return _lines(self._of(name) / METRICS, begin)

    def trajectories(self, name: str, step: int | None) -> dict[str, Any]:
        """Returns the steps with kept trajectories, and those of `step` (None: the newest step)."""
        steps: list[int] = []
        kept: dict[int, deque[dict[str, Any]]] = {}
        path, begin, is_all = self._of(name) / SAMPLES, 0, False
        while not is_all:
            part = _lines(path, begin)
            is_all = part.is_all or part.end == begin
            begin = part.end
            for row in part.rows:
                number = row.get("step")
                if not isinstance(number, int | float) or not abs(number) <= _MOST_STEPS:
                    continue
                number = int(number)
                if number not in kept:
                    steps.append(number)
                    if step is None:
                        kept.clear()
                    kept[number] = deque(maxlen=MOSTSAMPLES)
                if step is None or number == step:
                    kept[number].append(row)
        shown = step if step is not None else max(kept, default=None)
        rows = list(kept.get(shown, ())) if shown is not None else []
        return {"steps": sorted(set(steps)), "step": shown, "trajectories": rows}

    def about(self, name: str) -> dict[str, Any]:
        """Returns the summary of a run that has ended, and the end of the controller's log."""
        folder = self._of(name)
        summary = _table(folder / SUMMARY)
        # Only a run that ended before its last step because its task is solved says so.
        if not summary.get("solved"):
            summary.pop("solved", None)
        return {
            "summary": summary,
            "log": _tail(log_path(folder, "controller")),
        }

    def _of(self, name: str) -> Path:
        for folder in (self._folder, *self._children()):
            if folder.name == name and _is_run(folder):
                return folder
        raise UnknownRun(name)

    def _children(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [folder for folder in self._folder.iterdir() if _is_run(folder)]


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def _written_s(folder: Path) -> float:
    try:
        return (folder / METRICS).stat().st_mtime
    except OSError:
        return 0.0


def _lines(path: Path, begin: int) -> Part:
    """Reads the rows from byte `begin` on, up to the last complete line.

    Damaged lines are left out, so that the page shows the others.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(MOST_BYTES)
            is_all = len(data) < MOST_BYTES
    except OSError:
        return Part([], begin, is_all=True)
    complete = data[: data.rfind(b"\n") + 1]
    rows = []
    for line in complete.splitlines():
        row = _parsed(line)
        if isinstance(row, dict):
            rows.append(row)
    return Part(rows, begin + len(complete), is_all)


def _table(path: Path) -> dict[str, Any]:
    """The table in a JSON file; empty while the file is missing or incomplete."""
    try:
        found = _parsed(path.read_bytes())
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(data: bytes) -> object:
    """The value of a JSON text; None if `data` is no JSON, and for numbers that are not finite."""
    try:
        return json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    # Browsers do not read an answer with NaN or infinity.
    value = float(text)
    return value if math.isfinite(value) else None


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-60:]
    except OSError:
        return []
