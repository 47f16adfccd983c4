"""Opens regular files only: a pipe would let its reader wait for ever, a device never ends."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
}


def open_regular(path: Path, mode: str = "rb", *, buffering: int = -1) -> BinaryIO:
    """Opens a file as `open` does, without waiting; raises OSError if it is no regular file."""
    try:
        descriptor = os.open(path, _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # The answer to a writer of a pipe that nobody reads.
        raise (_no_file(path) if error.errno == errno.ENXIO else error) from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise _no_file(path)
    return cast(BinaryIO, os.fdopen(descriptor, mode, buffering))


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a regular file; raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is a pipe or a device, no regular file", str(path))
