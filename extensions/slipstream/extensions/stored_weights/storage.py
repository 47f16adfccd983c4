"""A folder or an object store that holds versions of weights, and the changed elements of a bucket.

Objects are reached through fsspec. Waits for: the storage. Unblocked by: its answer, the deadline
of the call, or `abandoned`. A call of fsspec cannot be cancelled: the thread of a late call is left
behind, and its result ignored.

A bucket may be stored as its changed elements. An element is a 16-bit unit of the bucket's bytes,
whatever the tensors' types: bits are compared, so -0.0 differs from 0.0 and a NaN's payload counts.
Elements are numbered in blocks of 256. A payload of c changed elements holds, one after the other
and little endian:

    for each block, the number of its changed elements    uint16
    the new elements, in order                            uint16 [c]
    their places in their blocks                          uint8 [c]
    zeros up to a multiple of 16 bytes

That is 3 bytes for each changed element and 1/256 of the whole. A bucket whose payload is more than
half of the bucket is stored whole. Writer and readers derive this from the number of changed
elements, which the manifest has.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ConfigError, ProtocolError, WeightSyncError
from slipstream.core.settings.config import Config
from slipstream.protocol.bounds import one_line
from slipstream.protocol.weights.buckets import ALIGNMENT_BYTES, Bucket
from slipstream.protocol.weights.digests import bucket_digest
from slipstream.protocol.weights.publish_waits import Unanswered, on_thread

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

    def write(
        self,
        key: str,
        data: memoryview,
        until: Until,
    ) -> None:
        """Writes one object; readers must not read it before this method returns."""

        def write() -> None:
            path = self._path(key)
            names = self._files.protocol
            # An object store would make a bucket for a folder.
            if _FOLDERS & ({names} if isinstance(names, str) else set(names)):
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, bytes(data))

        self._within(until, f"write {key}", write)

    def read(
        self,
        key: str,
        until: Until,
        *,
        most: int,
    ) -> bytes:
        """Returns one object, or its first `most` bytes if it is larger, to bound the memory."""
        path = self._path(key)
        return self._within(
            until, f"read {key}", lambda: bytes(self._files.cat_file(path, start=0, end=most))
        )

    def keys(self, folder: str, until: Until) -> list[str]:
        """Returns the keys of all objects in `folder`, at any depth."""
        path = self._path(folder)
        paths = self._within(until, f"list {folder}", lambda: self._files.find(path))
        return [str(path).removeprefix(f"{self._root}/") for path in paths]

    def remove(self, keys: list[str], until: Until) -> None:
        """Removes objects; those that do not exist are skipped."""

        def remove() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(key))

        self._within(until, f"remove {len(keys)} objects", remove)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _within(
        self,
        until: Until,
        what: str,
        call: Callable[[], Result],
    ) -> Result:
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


class Until:
    """The limit of one use of storage: a deadline, and an event that abandons the use earlier."""

    def __init__(self, limit_s: float, abandoned: threading.Event | None = None) -> None:
        """Ends the use `limit_s` seconds from now, or when `abandoned` is set."""
        # A time of `time.monotonic`.
        self.deadline_s = time.monotonic() + limit_s
        self.limit_s = limit_s
        self.abandoned = abandoned or threading.Event()

    def check(self, what: str) -> None:
        """Raises WeightSyncError after the deadline or when abandoned; `what` names the work."""
        if self.abandoned.is_set():
            raise WeightSyncError(f"{what}: abandoned")
        if time.monotonic() >= self.deadline_s:
            raise WeightSyncError(f"{what}: not done within {self.limit_s:g} s ({LIMIT})")


ELEMENT_BYTES = 2
BLOCK_ELEMENTS = 256
_COUNT_BYTES = 2

Elements = npt.NDArray[np.uint16]
# Indices in a bucket, of elements or of bytes.
Places = npt.NDArray[np.int64]


def num_blocks(bucket: Bucket) -> int:
    """Returns the number of a bucket's blocks; the last one may be shorter."""
    return -(-bucket.num_bytes // (ELEMENT_BYTES * BLOCK_ELEMENTS))


def payload_parts(bucket: Bucket, changed: int) -> tuple[int, int, int]:
    """Returns the byte offsets of a payload's elements, of their places, and of the end."""
    elements = _COUNT_BYTES * num_blocks(bucket)
    places = elements + ELEMENT_BYTES * changed
    return elements, places, -(-(places + changed) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def travels_whole(bucket: Bucket, changed: int) -> bool:
    """Whether a bucket with `changed` changed elements is sent whole, not as a payload."""
    return 2 * payload_parts(bucket, changed)[2] > bucket.num_bytes


def wire_bytes(bucket: Bucket, changed: int) -> int:
    """Returns the size in which a bucket with `changed` changed elements is sent."""
    is_whole = travels_whole(bucket, changed)
    return bucket.num_bytes if is_whole else payload_parts(bucket, changed)[2]


def put_payload(
    elements: Elements, payload: bytes | memoryview, bucket: Bucket, changed: int
) -> None:
    """Writes the changed elements of a payload to their places in `elements`, in main memory.

    Raises ProtocolError, and writes nothing, if the payload does not match this bucket and
    `changed`.
    """
    first, second, end = payload_parts(bucket, changed)
    if len(payload) != end:
        raise ProtocolError(f"a payload of {changed} changes has {end} bytes, got {len(payload)}")
    raw = np.frombuffer(payload, dtype=np.uint8)
    per_block = raw[:first].view("<u2")
    if int(per_block.sum(dtype=np.int64)) != changed:
        raise ProtocolError(f"a payload should have {changed} changes, got {per_block.sum()}")
    blocks = np.repeat(np.arange(len(per_block), dtype=np.int64), per_block)
    places = blocks * BLOCK_ELEMENTS + raw[second : second + changed]
    if changed and int(places.max()) >= len(elements):
        raise ProtocolError(f"a payload names element {places.max()} of {len(elements)}")
    elements[places] = raw[first:second].view("<u2")


def payload_of(elements: Elements, places: Places, bucket: Bucket) -> bytes:
    """Returns the payload of the elements at the ascending indices `places`."""
    per_block = np.bincount(places // BLOCK_ELEMENTS, minlength=num_blocks(bucket))
    within = (places % BLOCK_ELEMENTS).astype(np.uint8)
    parts = per_block.astype("<u2").tobytes(), elements[places].tobytes(), within.tobytes()
    return b"".join(parts).ljust(payload_parts(bucket, len(places))[2], b"\0")


def gap_bytes(bucket: Bucket) -> Places:
    """Returns the indices of bytes of no tensor: what lay there before would count as changes."""
    ends = [span.offset_bytes + span.tensor.num_bytes for span in bucket.spans]
    begins = [*(span.offset_bytes for span in bucket.spans[1:]), bucket.num_bytes]
    gaps = [np.arange(*gap, dtype=np.int64) for gap in zip(ends, begins, strict=True)]
    return np.concatenate(gaps)


def object_digest(data: bytes | memoryview) -> bytes:
    """Returns the digest of an object's bytes, which every reference to the object contains."""
    return hashlib.blake2b(data, digest_size=32).digest()


def content_name(bucket_digests: Iterable[bytes]) -> bytes:
    """Returns the name of all buckets' content, a digest of their digests; b"" without buckets."""
    digests = list(bucket_digests)
    return bucket_digest(digests) if digests else b""


def check(config: Config) -> None:
    """Raises ConfigError when fsspec cannot open the storage; sends no request to it."""
    assert config.weights.storage_url is not None
    Storage(config.weights.storage_url)
