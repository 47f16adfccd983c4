"""Reads files that programs nobody trusts have left."""

import os
import stat
from pathlib import Path


def read_left(path: Path, most_bytes: int, *, follow_link: bool = False) -> bytes:
    """Returns the file that a program may have left at `path`, without any wait.

    Raises OSError for a pipe, a socket, a device, a folder, more bytes, or, unless `follow_link`, a
    symbolic link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    # A file of Python would not close the descriptor of a folder, which it refuses.
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise OSError(f"it has more than {most_bytes} bytes")
    return data
