"""A server's copy of the newest version that it fetched from storage, and the orders to fetch.

Consumes: prepare orders, manifests and objects. Produces: a file with all buckets, whose digests
are checked, and one report READY or FAILED for each order.
Waits for: the storage, on a thread. Unblocked by: its answer, `weights.storage_deadline_s`, a newer
order, `close`.
"""

import asyncio
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from slipstream.core.errors import ProtocolError, WeightSyncError
from slipstream.core.run_folder import FETCHED
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import WeightsSection
from slipstream.core.types import ServerId
from slipstream.extensions.stored_weights import storage
from slipstream.protocol.bounds import check_bounds
from slipstream.protocol.weights.buckets import Bucket, layout_from_pb
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.rollout_server.part import ServerPart
from slipstream.v1 import fleet_pb2, weights_pb2

log = logging.getLogger(__name__)
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED


class StoredWeights:
    """Keeps a file with the newest fetched version; `fetch` may be called on any thread.

    The file holds all buckets, one after the other. A fetch that fails midway invalidates the file,
    and the next fetch begins with a whole version.
    """

    def __init__(self, weights: WeightsSection, folder: Path) -> None:
        """Keeps the file in `folder`. Raises ConfigError when fsspec cannot open the storage."""
        assert weights.storage_url is not None
        self._storage = storage.Storage(weights.storage_url)
        self._limit_s = weights.storage_deadline_s
        self._path = folder / "weights"
        self._lock = threading.Lock()
        # Content name of the version in the file; b"" if the file has no version.
        self._held = b""

    def forget(self) -> None:
        """Invalidates the file: the next fetch begins with a whole version."""
        self._held = b""

    def fetch(self, stored: weights_pb2.StoredWeights, abandoned: threading.Event) -> "Fetched":
        """Updates the file to the version of the manifest `stored`; returns the weights to load.

        Reads only the links that continue from the file's version, if there are such. Setting
        `abandoned` ends the fetch. Raises WeightSyncError if an object in storage is missing, late
        or not as the manifest says, or the disk is full.
        """
        until = storage.Until(self._limit_s, abandoned)
        started_s = time.monotonic()
        # An abandoned fetch ends soon.
        with self._lock:
            data = self._read(stored.key, stored.num_bytes, stored.digest, until)
            try:
                manifest = weights_pb2.StoredManifest.FromString(data)
                check_bounds(manifest)
            except (DecodeError, ProtocolError) as error:
                raise WeightSyncError(f"{stored.key} is no manifest: {error}") from error
            buckets = layout_from_pb(manifest.layout)
            links = list(manifest.links)
            # The links after the version in the file, or all without it.
            for place in range(len(links) - 1, -1, -1):
                if self._held and storage.content_name(links[place].bucket_digests) == self._held:
                    links = links[place + 1 :]
                    break
            num_bytes = stored.num_bytes
            anew = bool(links) and not links[0].HasField("delta")
            try:
                parts = self._mapped(buckets, anew=anew)
                for link in links:
                    num_bytes += self._apply(link, buckets, parts, until)
            except (OSError, ValueError) as error:
                # A file that was cut cannot be mapped: a ValueError.
                self._held = b""
                raise WeightSyncError(f"fetched weights in {self._path}: {error}") from error
        seconds = time.monotonic() - started_s
        return Fetched(manifest.layout, self._path, len(links), num_bytes, seconds)

    def _read(self, key: str, num_bytes: int, digest: bytes, until: storage.Until) -> bytes:
        data = self._storage.read(key, until, most=num_bytes + 1)
        if len(data) != num_bytes:
            received = f"only {len(data)}" if len(data) < num_bytes else "more"
            raise WeightSyncError(
                f"storage {self._storage.url} has {received} bytes of {key}, "
                f"{num_bytes} were written"
            )
        if storage.object_digest(data) != digest:
            raise WeightSyncError(
                f"storage {self._storage.url} has other bytes in {key} than were written"
            )
        return data

    def _mapped(self, buckets: Sequence[Bucket], *, anew: bool) -> list[npt.NDArray[np.uint8]]:
        """Returns the memory of each bucket in the file, which is made or emptied if `anew`."""
        ends = [0, *accumulate(bucket.num_bytes for bucket in buckets)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if anew else 0)
        file = os.open(self._path, flags, 0o600)
        try:
            if anew:
                # Otherwise a full disk would end the process when the memory is written.
                os.posix_fallocate(file, 0, ends[-1])
            mapped = np.frombuffer(mmap.mmap(file, ends[-1]), dtype=np.uint8)
        finally:
            os.close(file)
        return [mapped[start:end] for start, end in pairwise(ends)]

    def _apply(
        self,
        link: weights_pb2.StoredLink,
        buckets: Sequence[Bucket],
        parts: Sequence[npt.NDArray[np.uint8]],
        until: storage.Until,
    ) -> int:
        """Applies a manifest's link (a version or a delta) to the file; returns the bytes fetched.

        Raises WeightSyncError for a wrong digest, a malformed delta or a missing bucket.
        """
        self._held = b""
        changed = [0] * len(buckets)
        sizes = [bucket.num_bytes for bucket in buckets]
        if link.HasField("delta"):
            changed = list(link.delta.changed)
            sizes = [storage.wire_bytes(*pair) for pair in zip(buckets, changed, strict=True)]
        missing = set(range(len(buckets)))
        num_bytes = 0
        for stored in link.objects:
            data = memoryview(self._read(stored.key, stored.num_bytes, stored.digest, until))
            for place in stored.buckets:
                bucket = buckets[place]
                memory = parts[place]
                size = sizes[place]
                part = data[:size]
                data = data[size:]
                missing.discard(place)
                if len(part) == bucket.num_bytes:
                    memory[:] = np.frombuffer(part, dtype=np.uint8)
                else:
                    try:
                        storage.put_payload(memory.view(np.uint16), part, bucket, changed[place])
                    except ProtocolError as error:
                        raise WeightSyncError(f"bucket {place}: {error}") from error
                digest = bucket_digest(bucket_tensor_digests(bucket, memory.data))
                if digest != link.bucket_digests[place]:
                    raise WeightSyncError(f"bucket {place} of {stored.key} came out wrong")
            num_bytes += stored.num_bytes
        if missing:
            raise WeightSyncError(f"version {link.version.step} lacks {len(missing)} buckets")
        self._held = storage.content_name(link.bucket_digests)
        return num_bytes


@dataclass(frozen=True)
class Fetched:
    """A weight version fetched from storage to the file at `path`, and the cost of the fetch.

    The fetch read `num_links` whole versions and deltas: `num_bytes` in all, in `seconds`.
    """

    layout: weights_pb2.WeightLayout
    path: Path
    num_links: int
    num_bytes: int
    seconds: float


class FetchOrders:
    """Fetches one version at a time, and completes the order to load it.

    fetches = FetchOrders(stored, report, group)
    fetches.start(prepare)  # reports READY or FAILED later
    order = fetches.completed(receive)  # with the layout and the file
    fetches.close()
    """

    def __init__(
        self,
        stored: StoredWeights,
        report: Callable[[fleet_pb2.PublishReport], None],
        group: asyncio.TaskGroup,
    ) -> None:
        """Reports on publishes by `report`; the tasks of one session run in `group`."""
        self._stored = stored
        self._report = report
        self._group = group
        self._abandoned = threading.Event()
        # The publish whose version is in the file.
        self._ready: tuple[str, Fetched] | None = None

    def start(self, order: fleet_pb2.PreparePublish) -> None:
        """Begins to fetch the version of `order`; abandons an unfinished fetch."""
        self._abandoned.set()
        self._abandoned = threading.Event()
        self._ready = None
        self._group.create_task(self._fetch(order, self._abandoned))

    def completed(self, message: fleet_pb2.ControllerMessage) -> fleet_pb2.ControllerMessage:
        """Returns `message`; adds layout and file of the fetched version to a receive order.

        Call it for every message. After the verdict that a probe failed, the next fetch reads a
        whole version from storage.
        """
        kind = message.WhichOneof("message")
        if kind == "probe_verdict" and not message.probe_verdict.passed:
            self._stored.forget()
        if kind != "receive" or self._ready is None:
            return message
        order = message.receive.order
        publish_id, fetched = self._ready
        if order.communicator.transport == "storage" and order.publish_id == publish_id:
            message.receive.layout.CopyFrom(fetched.layout)
            order.communicator.path = str(fetched.path.resolve())
        return message

    def note(self, report: fleet_pb2.PublishReport) -> None:
        """Drops the fetched version if loading failed."""
        if report.phase == FAILED:
            self._stored.forget()

    def close(self) -> None:
        """Abandons an unfinished fetch."""
        self._abandoned.set()

    async def _fetch(self, order: fleet_pb2.PreparePublish, abandoned: threading.Event) -> None:
        report = fleet_pb2.PublishReport(publish_id=order.publish_id)
        try:
            fetched = await asyncio.to_thread(self._stored.fetch, order.stored, abandoned)
        except WeightSyncError as error:
            report.phase = FAILED
            report.message = str(error)
        else:
            if abandoned.is_set():
                return
            self._ready = order.publish_id, fetched
            report.phase = fleet_pb2.PUBLISH_PHASE_READY
            report.stages.fetch_s = fetched.seconds
            report.stages.fetched_bytes = fetched.num_bytes
            log.info(
                "fetched version %d in %.1f s: %d bytes, %d links",
                order.version.step,
                fetched.seconds,
                fetched.num_bytes,
                fetched.num_links,
            )
        self._report(report)


class StoredWeightsPart(ServerPart):
    """Fetches the versions of a run from storage."""

    def __init__(self, config: Config, server: ServerId) -> None:
        """Opens the storage; raises ConfigError if fsspec cannot."""
        self._stored = StoredWeights(config.weights, config.run_dir / FETCHED / server)

    def fetches(
        self,
        report: Callable[[fleet_pb2.PublishReport], None],
        group: asyncio.TaskGroup,
    ) -> FetchOrders:
        return FetchOrders(self._stored, report, group)
