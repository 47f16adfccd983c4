"""Files of results. No decision depends on them, so that a fault is a warning and ends no run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from slipstream.core.run_folder import rename_aside

# Takes a warning about a file, in one line.
Tell: TypeAlias = Callable[[str], None]


class ResultFile:
    r"""A file that grows by whole records and is recreated when it was removed.

    file = ResultFile(path, warn)
    file.append(b"{}\n")  # the disk is full: warns, and counts the lost record
    file.append(b"{}\n")  # the disk has room: warns how many records were lost
    file.check()          # between records: recreates a removed file, with a warning
    """

    unit = "lines"

    def __init__(self, path: Path, tell: Tell, *, header: bytes = b"") -> None:
        """Opens the file; `header` is written first into an empty file."""
        self._path, self._tell, self._header = path, tell, header
        self._file: FileIO | None = None
        self._num_lost = 0
        # The last warning about the disk; empty: the file can be written.
        self._trouble = ""
        self._reopen()

    def append(self, record: bytes) -> None:
        """Writes one record whole, or counts it as lost."""
        self.check()
        if self._file is None:
            self._reopen()
        if self._file is None:
            self._num_lost += 1
            return
        try:
            _write_whole(self._file, record)
        except OSError as error:
            self._num_lost += 1
            self._troubled(error)
            return
        if self._trouble:
            self._tell(f"{self._path} is written again; {self._num_lost} {self.unit} were lost")
            self._num_lost, self._trouble = 0, ""

    def check(self) -> None:
        """Recreates a file that was removed or replaced, with a warning."""
        if self._file is None or _is_open_at(self._file, self._path):
            return
        self._file.close()
        self._tell(f"{self._path} was removed while the run wrote it; it is made anew")
        self._reopen()

    def close(self) -> None:
        """Closes the file; warns of records lost since the last write."""
        if self._num_lost:
            self._tell(f"{self._path}: the last {self._num_lost} {self.unit} were lost")
            self._num_lost = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new_path(self) -> Path:
        """The path of a new file."""
        return self._path

    def _reopen(self) -> None:
        self._file = None
        try:
            self._path = self._new_path()
            file = open_or_set_aside(self._path, self._tell)
            try:
                if not os.fstat(file.fileno()).st_size:
                    _write_whole(file, self._header)
            except OSError:
                file.close()
                raise
            self._file = file
        except OSError as error:
            self._troubled(error)

    def _troubled(self, error: OSError) -> None:
        trouble = f"{self._path} cannot be written: {error.strerror}"
        if trouble != self._trouble:
            self._tell(f"{trouble}; what comes is lost until it can")
        self._trouble = trouble


def _write_whole(file: FileIO, record: bytes) -> None:
    """Appends `record`; on OSError the file keeps its old length."""
    size = os.fstat(file.fileno()).st_size
    try:
        while record:
            record = record[file.write(record) :]
    except OSError:
        file.truncate(size)
        raise


def _is_open_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def open_or_set_aside(path: Path, tell: Tell) -> FileIO:
    """Opens the file at `path` to append; anything there that is no file is renamed first."""
    if path.is_file() or not os.path.lexists(path):
        return path.open("ab", buffering=0)
    if not path.exists():
        # Opening a link whose target does not exist creates the target.
        with contextlib.suppress(OSError):
            return path.open("ab", buffering=0)
    set_aside(path, tell)
    return path.open("ab", buffering=0)


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
