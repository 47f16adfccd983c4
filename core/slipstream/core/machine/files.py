"""Opens regular files only, replaces files, and makes folders that no process leaves behind.

A pipe would let its reader wait for ever, and a device never ends.

A temporary folder is removed by the process that made it or, if that was killed, by a later one. A
process holds a lock on each folder that it has made. If the process is killed, the kernel frees the
locks. So a folder that another process can lock has lost its owner.
"""

import contextlib
import errno
import fcntl
import glob
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO, Literal, cast, get_args

from slipstream.core.machine.segments import remove_segments

_FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}


def open_regular(
    path: Path,
    mode: str = "rb",
    *,
    buffering: int = -1,
    follow_link: bool = True,
) -> BinaryIO:
    """Opens a file without waiting; raises OSError for a pipe, device, folder or refused link."""
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
    """Returns a regular file's bytes; raises OSError, also for more than `most_bytes`."""
    with open_regular(path, follow_link=follow_link) as file:
        data = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return data


def _no_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is a pipe or a device, no regular file", str(path))


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Writes a file, in place of an earlier one: one of them is there after a crash, and whole.

    Raises OSError, which names `path`, with the earlier file unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        # An error of a write names no file.
        error.filename = str(path)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Fsyncs a folder, so that the names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A unix socket's path has at most 107 bytes on Linux; this leaves room.
MAX_SOCKET_PATH_BYTES = 100
# The rest, for the temporary folder, in which vLLM's names of sockets have 37 bytes.
_MAX_TEMPORARY_BYTES = MAX_SOCKET_PATH_BYTES - 40
# Sockets of episodes, which programs that models write may see, lie in folders of the kind "relay".
Kind = Literal["sockets", "relay", "sandbox", "agent", "notebook"]
_SHORT: tuple[Kind, ...] = ("sockets", "relay")
_NAME = re.compile(rf"slipstream-(?P<kind>{'|'.join(get_args(Kind))})-[a-z0-9_]{{8}}")
# Accounts that systemd leaves unused.
_UNUSED_ACCOUNTS = range(1879048192, 2147483647)


class OwnedFolder:
    """A private folder of mode 0700, with a path short enough for sockets, which have 107 bytes."""

    def __init__(self, kind: Kind) -> None:
        """Makes the folder. On a file system without locks it stays if this process is killed."""
        while True:
            folder = _folder_of_sockets() if kind in _SHORT else None
            self.path = Path(tempfile.mkdtemp(prefix=f"slipstream-{kind}-", dir=folder))
            # A different process may find the folder before it is locked, and remove it.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.is_dir():
                    return
                os.close(self._lock)

    def close(self) -> None:
        _remove(self.path)
        os.close(self._lock)


def sandbox_accounts() -> range:
    """Returns the accounts that root gives to programs in sandboxes, with their folders.

    Empty if this process is not root, or root of a container that has no account but its own.
    """
    if os.geteuid() or sys.platform != "linux":
        return range(0)
    table = Path("/proc/self/uid_map").read_text()
    rows = [list(map(int, line.split())) for line in table.splitlines()]
    first, _, num_accounts = max(rows, key=lambda row: row[2])
    end = first + num_accounts
    if end >= _UNUSED_ACCOUNTS.stop:
        return _UNUSED_ACCOUNTS
    # The upper half of what a container has.
    return range(end - num_accounts // 2, end)


def remove_abandoned() -> None:
    """Removes this user's folders whose owner process has ended, with their shared memory.

    Nothing else is removed.
    """
    # `glob` finds nothing in a temporary folder that nobody can list.
    folders = {tempfile.gettempdir(), _folder_of_sockets()}
    paths = [glob.glob(f"{glob.escape(folder)}/slipstream-*") for folder in folders]
    for path in map(Path, itertools.chain.from_iterable(paths)):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            facts = os.fstat(folder)
            # A volume may set the setgid bit on all folders in it.
            mode = stat.S_IMODE(facts.st_mode) & ~stat.S_ISGID
            is_own = facts.st_uid == os.getuid() or facts.st_uid in sandbox_accounts()
            if not is_own or mode != 0o700:
                continue
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # A process holds it, or locks are unsupported.
                continue
            # Programs that models write may write into folders of other kinds.
            if name["kind"] == "sockets":
                remove_segments(path)
            _remove(path)
        finally:
            os.close(folder)


def _folder_of_sockets() -> str:
    """Returns the temporary folder, or /tmp if the paths of sockets in it were too long."""
    folder = tempfile.gettempdir()
    is_long = len(os.fsencode(folder)) > _MAX_TEMPORARY_BYTES
    return "/tmp" if is_long and os.access("/tmp", os.W_OK) else folder  # noqa: S108


def _remove(path: Path) -> None:
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # The rest is in folders that are not writable, or that are too deep for Python.
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(path)], stderr=subprocess.DEVNULL, check=False)
