"""Files of results. No decision depends on them, so that a fault is a warning and ends no run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from slipstream.core.run_folder import rename_aside

# Takes a warning about a file, in one line.
Tell: TypeAlias = Callable[[str], None]


class ResultFile:
    """A file that grows by whole records. A fault is one warning, and the number of lost records.

    Each record opens the file again, so that one that was removed begins anew.
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
