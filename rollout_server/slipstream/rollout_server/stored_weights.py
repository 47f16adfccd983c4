"""A server's own copy of the newest version that it fetched from storage.

Consumes: manifests and objects. Produces: one file with all buckets, whose digests are checked, and
one with what changed in them. Waits for: the storage. Unblocked by: its answer,
`weights.storage_deadline_s`, or `abandoned`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from slipstream.core.errors import ProtocolError, WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.protocol.weights.buckets import Bucket, layout_from_pb
from slipstream.protocol.weights.deltas import (
    Elements,
    Places,
    content_name,
    on_the_wire,
    put_payload,
)
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.protocol.weights.storage import Storage, Until
from slipstream.rollout_server.joined_changes import JoinedChanges
from slipstream.v1 import weights_pb2

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Fetched:
    """A version that lies in the file at `path`, and what fetching it took.

    `delta`: the file has only what the version changes of its base; None: it has all.
    """

    layout: weights_pb2.WeightLayout
    path: Path
    delta: weights_pb2.Delta | None
    num_links: int
    num_bytes: int
    seconds: float


class StoredWeights:
    """Brings its file from the version that it holds to a newer one; `fetch` on any thread.

    The file holds all buckets, one after the other. A fetch that fails in the middle leaves no
    version in it: the next one begins with a whole one. Where only the changes found no room, the
    file holds the version, and the next fetch gives the whole file.
    """

    def __init__(self, weights: WeightsSection, folder: Path) -> None:
        """Keeps the file in `folder`; ConfigError when fsspec cannot open the storage."""
        assert weights.storage_url is not None
        self._storage = Storage(weights.storage_url)
        self._limit_s = weights.storage_deadline_s
        self._path, self._changes_path = folder / "weights", folder / "changes"
        self._lock = threading.Lock()
        # The name of what the file holds; b"" for no version.
        self._held = b""

    def forget(self) -> None:
        """Takes the file for worthless: the next fetch begins with a whole version."""
        self._held = b""

    def fetch(
        self, stored: weights_pb2.StoredWeights, abandoned: threading.Event, base: bytes = b""
    ) -> Fetched:
        """Returns when the file holds the version of this manifest.

        `base`: the name of what the engine holds, if it takes changes of that. It gets them where
        the file held the same and the chain goes on from there; otherwise it gets the whole file.
        Raises WeightSyncError when the storage lacks something, has other bytes than the manifest
        says, or is late, and when the disk is full.
        """
        until = Until.after(self._limit_s, abandoned)
        started_s = time.monotonic()
        # An abandoned fetch ends soon.
        with self._lock:
            manifest = self._manifest(stored, until)
            buckets = layout_from_pb(manifest.layout)
            links = _lacking(manifest.links, self._held)
            num_bytes, delta = stored.num_bytes, None
            follows = bool(base and links) and base == self._held and not _is_whole(links)
            changes = JoinedChanges(buckets) if follows else None
            try:
                with _Buckets(self._path, buckets, anew=_is_whole(links)) as file:
                    for link in links:
                        num_bytes += self._apply(link, file, changes, until)
                    if changes is not None:
                        delta = self._write(changes, base, file)
            except (OSError, ValueError) as error:
                # A file that was cut cannot be mapped: a ValueError.
                self._held = b""
                raise WeightSyncError(f"fetched weights in {self._path}: {error}") from error
        seconds = time.monotonic() - started_s
        path = self._path if delta is None else self._changes_path
        return Fetched(manifest.layout, path, delta, len(links), num_bytes, seconds)

    def _write(
        self, changes: JoinedChanges, base: bytes, file: _Buckets
    ) -> weights_pb2.Delta | None:
        """Writes the changes; when the disk does not take them the other file keeps its version."""
        try:
            return changes.write(self._changes_path, base, file.elements)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._changes_path.unlink()
            raise WeightSyncError(f"changes in {self._changes_path}: {error}") from error

    def _manifest(
        self, stored: weights_pb2.StoredWeights, until: Until
    ) -> weights_pb2.StoredManifest:
        data = self._read(stored.key, stored.num_bytes, stored.digest, until)
        try:
            return weights_pb2.StoredManifest.FromString(data)
        except DecodeError as error:
            raise WeightSyncError(f"{stored.key} is no manifest: {error}") from error

    def _read(self, key: str, num_bytes: int, digest: bytes, until: Until) -> bytes:
        data = self._storage.read(key, until, most=num_bytes + 1)
        if len(data) != num_bytes:
            found = f"only {len(data)}" if len(data) < num_bytes else "more"
            raise WeightSyncError(
                f"storage {self._storage.url} has {found} bytes of {key}, {num_bytes} were written"
            )
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != digest:
            raise WeightSyncError(
                f"storage {self._storage.url} has other bytes in {key} than were written"
            )
        return data

    def _apply(
        self,
        link: weights_pb2.StoredLink,
        file: _Buckets,
        changes: JoinedChanges | None,
        until: Until,
    ) -> int:
        """Brings the file one link further and proves its buckets; returns the bytes fetched."""
        self._held = b""
        changed = list(link.delta.changed) if link.HasField("delta") else None
        wires = file.buckets if changed is None else on_the_wire(file.buckets, changed)
        missing = set(range(len(file.buckets)))
        num_bytes = 0
        for stored in link.objects:
            data = memoryview(self._read(stored.key, stored.num_bytes, stored.digest, until))
            for place in stored.buckets:
                size = wires[place].num_bytes
                part, data = data[:size], data[size:]
                places = file.put(place, part, 0 if changed is None else changed[place])
                if changes is not None:
                    changes.add(place, places)
                missing.discard(place)
                if file.digest(place) != link.bucket_digests[place]:
                    raise WeightSyncError(f"bucket {place} of {stored.key} came out wrong")
            num_bytes += stored.num_bytes
        if missing:
            raise WeightSyncError(f"version {link.version.step} lacks {len(missing)} buckets")
        self._held = content_name(link.bucket_digests)
        return num_bytes


class _Buckets:
    """The file of all buckets, mapped into memory inside a `with`."""

    def __init__(self, path: Path, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """`anew`: the file is made; else it must be there."""
        self.buckets = tuple(buckets)
        self._path, self._anew = path, anew
        self._starts = [0, *accumulate(bucket.num_bytes for bucket in buckets)]

    def __enter__(self) -> _Buckets:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if self._anew else 0)
        file = os.open(self._path, flags, 0o600)
        try:
            if self._anew:
                # Else a full disk would end the process when the memory is written.
                os.posix_fallocate(file, 0, self._starts[-1])
            self._map = mmap.mmap(file, self._starts[-1])
        finally:
            os.close(file)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        # Closing it would be an error while the traceback of one still holds a view.
        del self._bytes, self._map

    def put(self, place: int, data: memoryview, changed: int) -> Places | None:
        """Takes a whole bucket, or its payload of `changed` elements, whose places it returns."""
        bucket = self.buckets[place]
        if len(data) == bucket.num_bytes:
            self._at(place)[:] = np.frombuffer(data, dtype=np.uint8)
            return None
        try:
            return put_payload(self.elements(place), data, bucket, changed)
        except ProtocolError as error:
            raise WeightSyncError(f"bucket {place}: {error}") from error

    def elements(self, place: int) -> Elements:
        """Returns a view of a bucket's elements in the file."""
        return self._at(place).view(np.uint16)

    def digest(self, place: int) -> bytes:
        """Returns the digest of a bucket as it lies in the file."""
        return bucket_digest(bucket_tensor_digests(self.buckets[place], self._at(place).data))

    def _at(self, place: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._bytes[self._starts[place] : self._starts[place + 1]]


def _lacking(links: Sequence[weights_pb2.StoredLink], held: bytes) -> list[weights_pb2.StoredLink]:
    """Returns the links that lead from `held` to the end, all of them if it is not in the chain."""
    for place in range(len(links) - 1, -1, -1):
        if held and content_name(links[place].bucket_digests) == held:
            return list(links[place + 1 :])
    return list(links)


def _is_whole(links: Sequence[weights_pb2.StoredLink]) -> bool:
    return bool(links) and not links[0].HasField("delta")
