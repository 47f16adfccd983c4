"""Notes which files and folders this process has read, for whoever asks later what has changed.

Python tells its audit hooks of each file, folder and program that it opens. What libraries open by
themselves stays unknown, and so does what a program reads: the files beside it are noted.
"""

import contextlib
import importlib.util
import os
import stat
import sys
import sysconfig
import time
from pathlib import Path
from typing import TypeAlias

# Files that are noted; a process that reads more is not remembered.
MOST = 20_000
# Files beside a program that are noted with it; a folder with more is one of many programs.
MOST_BESIDE = 500
# Folders of the kernel, whose files have no time of their last change.
_OF_KERNEL = ("/proc/", "/sys/", "/dev/")
_WRITING = os.O_WRONLY | os.O_RDWR

# Bytes, and nanoseconds of the last change.
State: TypeAlias = tuple[int, int]


class ReadFiles:
    """The files that this process reads from now on; what it notes cannot be turned off again."""

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._read: set[str] = set()
        self._written: set[str] = set()
        self._programs: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and bool(flags & _WRITING)
            if isinstance(mode, str):
                writes = any(letter in mode for letter in "wax+")
            _add(self._written if writes else self._read, path)
        elif event in ("os.listdir", "os.scandir"):
            _add(self._read, arguments[0])
        elif event == "subprocess.Popen":
            words = arguments[1]
            for word in words if isinstance(words, list | tuple) else ():
                _add(self._programs, word)

    def states(self) -> dict[str, State]:
        """Returns the state of each file, and of the folders of installed packages.

        It is empty if it cannot be told: for too many files, or one that another process has
        changed since this one began.
        """
        names: set[str] = set()
        for name in (*self._read, *self._programs):
            names.add(_source(name))
        for name in tuple(self._programs):
            names.update(_beside(Path(name)))
        if len(names) > MOST:
            return {}
        packages = {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}
        installed = tuple(f"{folder}/" for folder in packages)
        # Where modules are looked for, anything that starts makes folders.
        searched = {os.path.abspath(place) for place in sys.path}
        states: dict[str, State] = {}
        for name in names | packages:
            state = state_of(name)
            if state is None or name.startswith(installed):
                continue
            if name in searched and name not in packages:
                continue
            is_file = os.path.isfile(name)
            if is_file and state[1] >= self._began_ns and name not in self._written:
                return {}
            states[name] = state
        return states


def state_of(name: str) -> State | None:
    """Returns the state of a file or folder, or None without one."""
    if name.startswith(_OF_KERNEL):
        return None
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(status.st_mode):
        return (0, status.st_mtime_ns)
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _add(names: set[str], path: object) -> None:
    if isinstance(path, str | bytes | os.PathLike) and len(names) <= MOST:
        with contextlib.suppress(ValueError, OSError):
            names.add(os.path.abspath(os.fsdecode(path)))


def _source(name: str) -> str:
    """Returns a module's source for its compiled file, since only the former tells a change."""
    if not name.endswith(".pyc"):
        return name
    try:
        return importlib.util.source_from_cache(name)
    except ValueError:
        return name


def _beside(program: Path) -> list[str]:
    """Returns the files in the folder of a program."""
    if not program.is_file():
        return []
    with os.scandir(program.parent) as entries:
        files = [entry.path for entry in entries if entry.is_file()]
    return files if len(files) <= MOST_BESIDE else []
