"""Private folders for unix sockets, with short paths, because the kernel takes at most 107 bytes.

A process that is killed cannot remove its folder. The folder's name is in a note file, and the next
process with the same note removes the folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "slipstream-"


def make_socket_folder(note: Path) -> Path:
    """Makes a folder of mode 0700 and names it in `note`; removes the folder named before."""
    _remove_noted(note)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(str(folder))
    return folder


def remove_socket_folder(note: Path) -> None:
    """Removes the folder that `note` names, and `note`; does nothing without a note."""
    _remove_noted(note)
    note.unlink(missing_ok=True)


def _remove_noted(note: Path) -> None:
    if not note.is_file():
        return
    folder = Path(note.read_text())
    # The note may hold any path: only a folder like those of `make_socket_folder` is removed.
    if folder.parent != Path(tempfile.gettempdir()) or not folder.name.startswith(_PREFIX):
        return
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)
