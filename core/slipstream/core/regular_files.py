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


def open_regular(
    path: Path, mode: str = "rb", *, buffering: int = -1, follow_link: bool = True
) -> BinaryIO:
    """Opens a file as `open` does, without waiting; raises OSError if it is no regular file.

    A symbolic link raises OSError too unless `follow_link`.
    """
    flags = _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, 0o666)
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


def read_regular(path: Path, *, most_bytes: int | None = None, follow_link: bool = True) -> bytes:
    """Returns the bytes of a regular file; raises OSError as `open_regular` does.

    Raises OSError, too, if it has more than `most_bytes`.
    """
    with open_regular(path, follow_link=follow_link) as file:
        data = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return data


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is a pipe or a device, no regular file", str(path))
