"""A folder or an object store that holds versions of weights, reached through fsspec.

Waits for: the storage. Unblocked by: its answer, the deadline of the call, or `abandoned`. A call
of fsspec cannot be cancelled: the thread of a late call is left behind, and its result ignored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.protocol.bounds import one_line
from slipstream.protocol.weights.waits import Unanswered, on_thread

log = logging.getLogger(__name__)

Result = TypeVar("Result")
# fsspec has no types.
FileSystem: TypeAlias = Any

# The setting that limits each use of storage.
LIMIT = "weights.storage_deadline_s"
_MAX_MESSAGE = 500
# fsspec's names of the protocols that have folders.
_FOLDERS = frozenset({"file", "local", "sftp", "ssh", "smb"})


class Storage:
    """Reads and writes whole objects by key below one URL; any thread may call any method.

    Methods block, and raise WeightSyncError if the storage fails or when `until` ends.
    """

    def __init__(self, url: str) -> None:
        """Opens `url` without a request to it. Raises ConfigError if fsspec cannot open it."""
        import fsspec

        self.url = url.rstrip("/")
        try:
            # Options and credentials come from the environment, as fsspec and the store say.
            self._files: FileSystem
            self._files, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"weights.storage_url must be a folder or a URL that fsspec opens, got "
                f"{self.url}: {one_line(str(error), _MAX_MESSAGE)}"
            ) from error

    def write(self, key: str, data: memoryview, until: Until) -> None:
        """Writes one object; readers must not read it before this method returns."""

        def write() -> None:
            path, names = self._path(key), self._files.protocol
            # An object store would make a bucket for a folder.
            if _FOLDERS & ({names} if isinstance(names, str) else set(names)):
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, bytes(data))

        self._within(until, f"write {key}", write)

    def read(self, key: str, until: Until, *, most: int) -> bytes:
        """Returns one object, or its first `most` bytes if it is larger, to bound the memory."""
        path = self._path(key)
        return self._within(
            until, f"read {key}", lambda: bytes(self._files.cat_file(path, start=0, end=most))
        )

    def keys(self, folder: str, until: Until) -> list[str]:
        """Returns the keys of all objects in `folder`, at any depth."""

        def find() -> list[str]:
            try:
                found = self._files.find(self._path(folder))
            except FileNotFoundError:
                return []
            return [str(path).removeprefix(f"{self._root}/") for path in found]

        return self._within(until, f"list {folder}", find)

    def remove(self, keys: list[str], until: Until) -> None:
        """Removes objects; those that do not exist are skipped."""

        def remove() -> None:
            for key in keys:
                try:
                    self._files.rm_file(self._path(key))
                except FileNotFoundError:
                    log.info("%s was removed before", key)

        self._within(until, f"remove {len(keys)} objects", remove)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _within(self, until: Until, what: str, call: Callable[[], Result]) -> Result:
        what = f"storage {self.url} could not {what}"
        until.check(what)
        left_s = until.deadline_s - time.monotonic()
        try:
            return on_thread(call, left_s, until.abandoned, name="weight-storage")
        except Unanswered:
            until.check(what)
            raise WeightSyncError(
                f"{what}: not done within {until.limit_s:g} s ({LIMIT})"
            ) from None
        except Exception as error:  # noqa: BLE001 - each store has its own errors
            cause = one_line(str(error) or type(error).__name__, _MAX_MESSAGE)
            raise WeightSyncError(f"{what}: {cause}") from error


@dataclass(frozen=True)
class Until:
    """The limit of one use of storage: a deadline, and an event that abandons the use earlier.

    `deadline_s` is a time of `time.monotonic`, `limit_s` seconds after the start of the use.
    """

    deadline_s: float
    limit_s: float
    abandoned: threading.Event

    @classmethod
    def after(cls, limit_s: float, abandoned: threading.Event | None = None) -> Until:
        """Returns the limit that ends `limit_s` seconds from now, or when `abandoned` is set."""
        return cls(time.monotonic() + limit_s, limit_s, abandoned or threading.Event())

    def check(self, what: str) -> None:
        """Raises WeightSyncError after the deadline or when abandoned; `what` names the work."""
        if self.abandoned.is_set():
            raise WeightSyncError(f"{what}: abandoned")
        if time.monotonic() >= self.deadline_s:
            raise WeightSyncError(f"{what}: not done within {self.limit_s:g} s ({LIMIT})")
