"""A new file that is there whole or not at all, whenever its writer is killed."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from slipstream.core.errors import ConfigError
from slipstream.core.machine.files import sync_folder


@contextlib.contextmanager
def new_file(path: Path, tell: Callable[[str], None]) -> Iterator[BinaryIO]:
    """Opens a file for the block; it has its name once the block ends, and replaces no other.

    After an error in the block there is none. What killed writers of this file have left is
    removed, and `tell` gets a line for each. Raises ConfigError for a file that is there by then.
    """
    remove_left(path, tell)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _locked(partial) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.link(partial, path)
        except FileExistsError:
            raise ConfigError(f"{path} exists already: remove it, or name another file") from None
        finally:
            partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_left(path: Path, tell: Callable[[str], None]) -> None:
    """Removes what killed writers of `path` have left, beside writers that go on."""
    beginning = f".{path.name}."
    for left in sorted(path.parent.iterdir()):
        number = left.name.removeprefix(beginning).removesuffix(".partial")
        is_partial = left.name == f"{beginning}{number}.partial" and number.isdecimal()
        if not (is_partial and left.is_file()):
            continue
        # A writer that goes on holds its lock, and a file system without locks keeps the file.
        with left.open("rb") as file, contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)
            tell(f"{left} is removed, which a call that was killed has left")


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[BinaryIO]:
    """Creates a file and locks it, so that others see that its writer lives."""
    while True:
        with partial.open("xb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another call may have removed it before it was locked.
            if os.path.lexists(partial):
                yield file
                return
