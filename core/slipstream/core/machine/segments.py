"""Shared memory that an engine leaves in /dev/shm when its processes are killed.

Names in /dev/shm tell no owner: those of Python's segments are random. A process therefore notes
the segments of its engine in a folder that it owns; once its lock on the folder is gone, so are all
processes that mapped them.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NOTES = "segments"
# A line of /proc/PID/maps: inode and name of a segment of Python's multiprocessing.
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/(psm_[0-9a-f]{8,})$", re.MULTILINE)
_NOTE = re.compile(r"(\d+) (psm_[0-9a-f]{8,})")


def note_segments(folder: Path, processes: Iterable[int]) -> None:
    """Writes into `folder` which segments these processes map; a process may have ended."""
    segments: set[tuple[str, str]] = set()
    for process in processes:
        try:
            segments.update(_MAPPED.findall(Path(f"/proc/{process}/maps").read_text()))
        except OSError:
            continue
    (folder / _NOTES).write_text("".join(f"{inode} {name}\n" for inode, name in sorted(segments)))


def remove_segments(folder: Path) -> None:
    """Removes this user's segments that `folder` notes, and memory that is named after it.

    Call it only when all processes that mapped them have ended. A segment of a noted name with
    another inode is somebody else's, and stays.
    """
    for path in SHARED_MEMORY.glob(f"{folder.name}-*cpushm_*"):
        _unlink(path, inode=None)
    try:
        notes = (folder / _NOTES).read_text()
    except (OSError, UnicodeDecodeError):
        return
    for line in notes.splitlines():
        if note := _NOTE.fullmatch(line):
            _unlink(SHARED_MEMORY / note[2], inode=int(note[1]))


def _unlink(path: Path, *, inode: int | None) -> None:
    try:
        facts = path.lstat()
        if facts.st_uid == os.getuid() and inode in (None, facts.st_ino):
            path.unlink()
    except FileNotFoundError:
        # A second process of this user removes the same.
        return
