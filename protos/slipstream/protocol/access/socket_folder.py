"""Private folders for unix sockets: short, because the kernel takes no more than 107 bytes of path.

A process that is killed cannot remove its folder. Its name is noted in a file, and whoever has the
same note next removes it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "slipstream-"


def make_socket_folder(note: Path) -> Path:
    """A new folder of mode 0700 that `note` names from now on; removes the one that it named."""
    _remove_noted(note)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(str(folder))
    return folder


def remove_socket_folder(note: Path) -> None:
    """Removes the folder that `note` names, and `note`; nothing when there is none."""
    _remove_noted(note)
    note.unlink(missing_ok=True)


def _remove_noted(note: Path) -> None:
    if not note.is_file():
        return
    folder = Path(note.read_text())
    # Whatever the file says: nothing but a folder as `make_socket_folder` makes it is removed.
    if folder.parent != Path(tempfile.gettempdir()) or not folder.name.startswith(_PREFIX):
        return
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)
