"""A server's copy of the newest version that it fetched from storage, and the orders to fetch.

Consumes: prepare orders, manifests and objects. Produces: a file with all buckets, whose digests
are checked, a file with the changes of a delta, and one report READY or FAILED for each order.
Waits for: the storage, on a thread. Unblocked by: its answer, `weights.storage_deadline_s`, a newer
order, `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from slipstream.core.errors import ProtocolError, WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.protocol.bounds import check_bounds
from slipstream.protocol.weights.buckets import Bucket, layout_from_pb
from slipstream.protocol.weights.deltas import (
    ELEMENT_BYTES,
    Elements,
    Places,
    content_name,
    on_the_wire,
    payload_of,
    put_payload,
    travels_whole,
)
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.protocol.weights.storage import Storage, Until
from slipstream.v1 import fleet_pb2, weights_pb2

log = logging.getLogger(__name__)
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Fetched:
    """A weight version fetched from storage to the file at `path`, and the cost of the fetch.

    `delta` describes a file that has only the changes to a base version; it is None for a file with
    all weights. The fetch read `num_links` whole versions and deltas: `num_bytes` in all, in
    `seconds`.
    """

    layout: weights_pb2.WeightLayout
    path: Path
    delta: weights_pb2.Delta | None
    num_links: int
    num_bytes: int
    seconds: float


class StoredWeights:
    """Keeps a file with the newest fetched version; `fetch` may be called on any thread.

    The file holds all buckets, one after the other. A fetch that fails midway invalidates the file,
    and the next fetch begins with a whole version. The changes of a delta are written to a second
    file. If the disk has no room for the second file, the fetch fails, but the first file has the
    new version, which the next fetch returns whole.
    """

    def __init__(self, weights: WeightsSection, folder: Path) -> None:
        """Keeps the file in `folder`. Raises ConfigError when fsspec cannot open the storage."""
        assert weights.storage_url is not None
        self._storage = Storage(weights.storage_url)
        self._limit_s = weights.storage_deadline_s
        self._path, self._changes_path = folder / "weights", folder / "changes"
        self._lock = threading.Lock()
        # Content name of the version in the file; b"" if the file has no version.
        self._held = b""

    def forget(self) -> None:
        """Invalidates the file: the next fetch begins with a whole version."""
        self._held = b""

    def fetch(
        self, stored: weights_pb2.StoredWeights, abandoned: threading.Event, base: bytes = b""
    ) -> Fetched:
        """Updates the file to the version of the manifest `stored`; returns the weights to load.

        `base` is the content name of the engine's weights if the engine takes deltas, else b"". The
        result is a delta if the file held the same weights and the manifest's links continue from
        them, otherwise the whole file. Setting `abandoned` ends the fetch. Raises WeightSyncError
        if an object in storage is missing, late or not as the manifest says, or the disk is full.
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
        """Writes the file of changes; returns the delta, or None if every bucket would be whole.

        Raises WeightSyncError if the disk is full; the file of all buckets keeps its version.
        """
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
            manifest = weights_pb2.StoredManifest.FromString(data)
            check_bounds(manifest)
            return manifest
        except (DecodeError, ProtocolError) as error:
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
        """Applies a manifest's link (a version or a delta) to the file; returns the bytes fetched.

        Adds the indices of changed elements to `changes`, if given. Raises WeightSyncError for a
        wrong digest or a missing bucket.
        """
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
    """The file of all buckets, mapped into memory inside a `with` block."""

    def __init__(self, path: Path, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """With `anew` the file is created, or emptied if it exists; otherwise it must exist."""
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
        # Closing the map would fail while the traceback of an error still holds a view of it.
        del self._bytes, self._map

    def put(self, place: int, data: memoryview, changed: int) -> Places | None:
        """Writes `data` to bucket `place`: the whole bucket, or `changed` elements of it.

        Returns the indices of the changed elements, or None for a whole bucket. Raises
        WeightSyncError if `data` is malformed.
        """
        bucket = self.buckets[place]
        if len(data) == bucket.num_bytes:
            self._at(place)[:] = np.frombuffer(data, dtype=np.uint8)
            return None
        try:
            return put_payload(self.elements(place), data, bucket, changed)
        except ProtocolError as error:
            raise WeightSyncError(f"bucket {place}: {error}") from error

    def elements(self, place: int) -> Elements:
        """Returns a view of the bucket's 16-bit elements in the file."""
        return self._at(place).view(np.uint16)

    def digest(self, place: int) -> bytes:
        """Returns the digest of bucket `place`, computed from the bytes in the file."""
        return bucket_digest(bucket_tensor_digests(self.buckets[place], self._at(place).data))

    def _at(self, place: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._bytes[self._starts[place] : self._starts[place + 1]]


def _lacking(links: Sequence[weights_pb2.StoredLink], held: bytes) -> list[weights_pb2.StoredLink]:
    """Returns the links after the version with content name `held`, or all links without it."""
    for place in range(len(links) - 1, -1, -1):
        if held and content_name(links[place].bucket_digests) == held:
            return list(links[place + 1 :])
    return list(links)


def _is_whole(links: Sequence[weights_pb2.StoredLink]) -> bool:
    return bool(links) and not links[0].HasField("delta")


class JoinedChanges:
    """Collects the indices of elements that changed over several versions, 4 bytes for each.

    changes = JoinedChanges(buckets)
    changes.add(place, places)  # for each bucket of each version
    delta = changes.write(path, base, elements_of)  # with the last version's values
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        # None if the bucket came whole.
        self._places: list[list[npt.NDArray[np.uint32]] | None] = [[] for _ in buckets]

    def add(self, place: int, places: Places | None) -> None:
        """Adds the indices of changed elements of bucket `place`; None stands for all elements."""
        earlier = self._places[place]
        if places is None or earlier is None:
            self._places[place] = None
        elif len(places):
            earlier.append(places.astype(np.uint32))

    def write(
        self, path: Path, base: bytes, elements_of: Callable[[int], Elements]
    ) -> weights_pb2.Delta | None:
        """Writes all buckets to `path` in wire format, one after the other; returns their delta.

        Returns None, and writes nothing, if every bucket would travel whole. Raises OSError when
        the disk is full.
        """
        joined = [self._joined(place) for place in range(len(self._buckets))]
        # Changed elements of each bucket; a bucket that came whole counts all of its elements.
        counts = [
            bucket.num_bytes // ELEMENT_BYTES if places is None else len(places)
            for bucket, places in zip(self._buckets, joined, strict=True)
        ]
        wholes = list(map(travels_whole, self._buckets, counts))
        if all(wholes):
            return None
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for place, (bucket, places) in enumerate(zip(self._buckets, joined, strict=True)):
                elements = elements_of(place)
                if places is None or wholes[place]:
                    file.write(elements.data)
                else:
                    file.write(payload_of(elements, places, bucket))
        return weights_pb2.Delta(base=base, changed=counts)

    def _joined(self, place: int) -> Places | None:
        found = self._places[place]
        if found is None:
            return None
        return np.unique(np.concatenate([np.empty(0, np.uint32), *found])).astype(np.int64)


FAILED = fleet_pb2.PUBLISH_PHASE_FAILED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING


class FetchOrders:
    """Fetches one version at a time, and completes the order to load it.

    fetches = FetchOrders(stored, report, group)
    fetches.start(prepare)  # reports READY or FAILED later
    order = fetches.completed(receive)  # with the layout and the file
    fetches.close()
    """

    def __init__(
        self,
        stored: StoredWeights | None,
        report: Callable[[fleet_pb2.PublishReport], None],
        group: asyncio.TaskGroup,
    ) -> None:
        """`stored` is None for a server that takes its weights from the trainer."""
        self._stored, self._report, self._group = stored, report, group
        self._abandoned = threading.Event()
        # The publish whose version is in the file.
        self._ready: tuple[str, Fetched] | None = None
        # Content name of the weights that the engine serves, if it takes deltas to them, else b"".
        self._served = b""

    def start(self, order: fleet_pb2.PreparePublish) -> None:
        """Begins to fetch the version of `order`; abandons an unfinished fetch."""
        self._abandoned.set()
        self._abandoned, self._ready = threading.Event(), None
        self._group.create_task(self._fetch(order, self._abandoned))

    def completed(self, message: fleet_pb2.ControllerMessage) -> fleet_pb2.ControllerMessage:
        """Returns `message`; adds layout, file and delta of the fetched version to a receive order.

        Call it for every message. After the verdict that a probe failed, the next fetch reads a
        whole version from storage. After an abort, the engine gets all weights of the next version.
        """
        kind = message.WhichOneof("message")
        if kind == "abort":
            self._served = b""
        if kind == "probe_verdict" and not message.probe_verdict.passed:
            self._forget()
        if kind != "receive" or self._ready is None:
            return message
        order, (publish_id, fetched) = message.receive.order, self._ready
        if order.communicator.transport == "storage" and order.publish_id == publish_id:
            message.receive.layout.CopyFrom(fetched.layout)
            order.communicator.path = str(fetched.path.resolve())
            if fetched.delta is not None:
                order.delta.CopyFrom(fetched.delta)
        self._served = b""
        return message

    def note(self, report: fleet_pb2.PublishReport) -> None:
        """Records which weights the engine serves; drops the fetched version if loading failed."""
        if report.phase == FAILED:
            self._forget()
        elif report.phase == SERVING and report.stages.takes_deltas:
            self._served = content_name(report.bucket_digests)

    def close(self) -> None:
        """Abandons an unfinished fetch."""
        self._abandoned.set()

    def _forget(self) -> None:
        self._served = b""
        if self._stored is not None:
            self._stored.forget()

    async def _fetch(self, order: fleet_pb2.PreparePublish, abandoned: threading.Event) -> None:
        report = fleet_pb2.PublishReport(publish_id=order.publish_id)
        try:
            if self._stored is None:
                raise WeightSyncError('rollout_server.weights_from is not "storage" here')
            arguments = order.stored, abandoned, self._served
            fetched = await asyncio.to_thread(self._stored.fetch, *arguments)
        except WeightSyncError as error:
            report.phase, report.message = FAILED, str(error)
        else:
            if abandoned.is_set():
                return
            self._ready = order.publish_id, fetched
            report.phase = fleet_pb2.PUBLISH_PHASE_READY
            report.stages.fetch_s = fetched.seconds
            report.stages.fetched_bytes = fetched.num_bytes
            report.stages.fetched_links = fetched.num_links
            log.info(
                "fetched version %d in %.1f s: %d bytes, %d links; the engine takes %s",
                *(order.version.step, fetched.seconds, fetched.num_bytes, fetched.num_links),
                "all of it" if fetched.delta is None else "what changed",
            )
        self._report(report)
