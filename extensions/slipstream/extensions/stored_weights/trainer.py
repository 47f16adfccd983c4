"""Writes versions to storage while training continues, for servers that fetch them from there.

Consumes: store orders. Produces: objects, then the manifest that names them, then a report. Waits
for: one pass over the weights; a thread of each sending rank does the rest. Unblocked by: the
storage, or `weights.storage_deadline_s`.

A manifest is written after all objects that it names. Only then does the controller learn its key
and digest, and servers learn them from the controller: no server ever sees half of a version.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from slipstream.core.errors import RunFailed, WeightSyncError
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import WeightsSection
from slipstream.extensions.stored_weights.storage import (
    Storage,
    Until,
    gap_bytes,
    object_digest,
    payload_of,
    travels_whole,
)
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.learner.trainer.weights.weight_publisher import Published
from slipstream.protocol.bounds import one_line
from slipstream.protocol.weights.buckets import Bucket
from slipstream.v1 import trainer_pb2, weights_pb2
from torch import Tensor

logger = logging.getLogger(__name__)

# At least one of so many versions is stored whole, the others only as changes.
WHOLE_EVERY = 20
# Seconds between two checks whether another rank has written its objects.
_LOOK_S = 0.2
# Seconds that the end of the run waits for the storage.
_CLOSE_LIMIT_S = 30.0
# Most characters of an error that is reported.
_MAX_CAUSE = 500


class StorageWriter:
    """Carries out store orders one after another; `store` and `close` are collective.

    `store` copies the weights and returns; a thread on each sending rank writes them. Rank 0
    collects what the ranks have written, reports it, and removes objects that no server needs any
    more.
    """

    def __init__(
        self,
        published: Published,
        weights: WeightsSection,
        *,
        ranks: Ranks,
        client: ControllerClient,
    ) -> None:
        """Opens `weights.storage_url`; raises ConfigError if fsspec cannot open it."""
        assert weights.storage_url is not None
        self._published = published
        self._weights = weights
        self._ranks = ranks
        self._client = client
        self._storage = Storage(weights.storage_url)
        self._thread: threading.Thread | None = None
        # Ends the newest order.
        self._abandoned = threading.Event()
        # The objects take twice the memory of the rank's buckets: None before the first order.
        self._objects: RankObjects | None = None
        # The folder of the run in storage; "" before the first order.
        self._run = ""
        # The newest version and its deltas, on rank 0; empty if the next version must be whole.
        self._chain: list[weights_pb2.StoredLink] = []
        # The epoch of the registration under which the chain was written, on rank 0.
        self._epoch = ""
        # On rank 0: all keys that a manifest of this trainer names, by the manifest's key.
        self._named: dict[str, set[str]] = {}

    @property
    def is_idle(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def store(self, order: trainer_pb2.StoreOrder, probe: weights_pb2.Probe) -> None:
        """Copies the weights on all ranks, and begins to write them on a thread.

        `probe` is included in the report of the version. A write that this rank has not finished is
        abandoned.
        """
        self._run = order.folder.partition("/")[0]
        if self._thread is not None:
            # An order comes only when rank 0 is idle, so what this rank still writes is abandoned.
            self._abandoned.set()
            self._thread.join()
        self._abandoned = threading.Event()
        until = Until(self._weights.storage_deadline_s, self._abandoned)
        choice = b"whole" if self._ranks.is_main and self._is_whole() else b"changes"
        is_whole = self._ranks.broadcast_bytes(choice if self._ranks.is_main else None) == b"whole"
        sender = self._published.weights.sender
        if sender is None:
            # Ranks that send nothing take part in the same pass.
            self._published.run(lambda *_: None)
            return
        if self._objects is None:
            self._objects = RankObjects(
                self._published.weights.buckets,
                sender,
                self._storage,
                object_bytes=self._weights.bucket_mib << 20,
                pin=self._ranks.device.type == "cuda",
            )
        digests = self._published.run(self._objects.take)
        report = trainer_pb2.StoredReport(
            version=order.version,
            folder=order.folder,
            bucket_digests=digests.buckets,
            probe=probe,
            whole_bytes=self._published.num_bytes(adapters_alone=False),
        )
        self._thread = threading.Thread(
            target=self._write, args=(report, is_whole, until), name="version-writer", daemon=True
        )
        self._thread.start()

    def close(self, *, keep: bool = False) -> None:
        """Abandons an unfinished write; unless `keep`, rank 0 removes the run from the storage.

        With `keep` the run may continue, and servers may still fetch its versions.
        """
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()
        if self._ranks.is_main and self._run and not keep:
            self._remove_all(self._run, Until(_CLOSE_LIMIT_S))

    def _is_whole(self) -> bool:
        """Whether the next version is stored whole, not as a delta to the version before it.

        It is whole if there is no chain of deltas yet, or if the chain has `WHOLE_EVERY` versions.
        It is whole, too, if the chain's deltas are together as large as the whole version at its
        beginning, or after a new registration: another trainer may have removed the chain.
        """
        if self._epoch != self._client.epoch:
            self._epoch = self._client.epoch
            self._chain = []
        size = sum(_num_bytes(link) for link in self._chain[1:])
        is_long = len(self._chain) >= WHOLE_EVERY
        return not self._chain or is_long or size >= _num_bytes(self._chain[0])

    def _write(self, report: trainer_pb2.StoredReport, whole: bool, until: Until) -> None:
        """Writes this rank's objects; rank 0 also writes the manifest and reports the version."""
        assert self._objects is not None
        part = _part(report.folder, self._published.weights.sender)
        started_s = time.monotonic()
        try:
            link = self._objects.write(
                report.folder, report.bucket_digests, whole=whole, until=until
            )
            link.version.CopyFrom(report.version)
            if not self._ranks.is_main:
                self._ranks.flags.set(part, link.SerializeToString())
                return
            changed = list(link.delta.changed)
            for number, rank in enumerate(self._published.weights.senders[1:], 1):
                # Waits for the other senders' objects and numbers of changed elements.
                what = f"rank {rank} could not write version {report.folder}"
                while (came := self._ranks.flags.take(_part(report.folder, number))) is None:
                    until.check(what)
                    time.sleep(_LOOK_S)
                if not came:
                    raise WeightSyncError(f"{what}: its log says why")
                theirs = weights_pb2.StoredLink.FromString(came)
                link.objects.extend(theirs.objects)
                changed = [sum(both) for both in zip(changed, theirs.delta.changed, strict=True)]
            if link.HasField("delta"):
                link.delta.changed[:] = changed
            chain = [link] if whole else [*self._chain, link]
            layout = self._published.layout(adapters_alone=False)
            data = weights_pb2.StoredManifest(layout=layout, links=chain).SerializeToString()
            key = f"{report.folder}/manifest"
            self._storage.write(key, memoryview(data), until)
            self._named[key] = {key, *(stored.key for link in chain for stored in link.objects)}
            report.stored.key, report.stored.num_bytes = key, len(data)
            report.stored.digest = object_digest(data)
            report.num_bytes = _num_bytes(link)
            self._chain = chain
        except Exception as error:  # noqa: BLE001 - reported; the thread has no caller
            self._chain = []
            cause = str(error)
            if not isinstance(error, WeightSyncError):
                logger.exception("version %d", report.version.step)
                cause = one_line(f"{type(error).__name__}: {error}", _MAX_CAUSE)
            if self._abandoned.is_set():
                # The run is over, or rank 0 has reported why this version was not stored.
                return
            if not self._ranks.is_main:
                logger.warning("version %d: %s", report.version.step, cause)
                self._ranks.flags.set(part)
                return
            report.error = cause
            # The objects of the failed version would keep a full disk full.
            until = Until(_CLOSE_LIMIT_S, self._abandoned)
            self._remove_all(report.folder, until)
        report.write_s = time.monotonic() - started_s
        self._report(report, until)

    def _report(self, report: trainer_pb2.StoredReport, until: Until) -> None:
        """Reports to the controller, and removes objects that no needed manifest names.

        The objects are listed before the report. A trainer writes only while it holds the place in
        the run, and the controller accepts the report only from the trainer that holds it: no
        listed object belongs to a later trainer.
        """
        keys: list[str] = []
        with _failure_logged():
            keys = [] if report.error else self._storage.keys(self._run, until)
        try:
            receipt = self._client.report_stored(report)
        except RunFailed as error:
            # The trainer's next call says the same, or the controller is back by then.
            logger.warning("version %d in storage: %s", report.version.step, error)
            self._chain = []
            return
        if report.error:
            return
        needed = {report.stored.key, *receipt.needed}
        self._named = {key: keys for key, keys in self._named.items() if key in needed}
        if not needed <= self._named.keys():
            # A server still fetches a version of an earlier trainer, and only that trainer knows
            # its keys.
            return
        needed_keys = set().union(*self._named.values())
        with _failure_logged():
            self._storage.remove([key for key in keys if key not in needed_keys], until)

    def _remove_all(self, folder: str, until: Until) -> None:
        with _failure_logged():
            self._storage.remove(self._storage.keys(folder, until), until)


@contextlib.contextmanager
def _failure_logged() -> Iterator[None]:
    """Logs a failure of the storage, which then keeps what it should not have any more."""
    try:
        yield
    except WeightSyncError as error:
        logger.warning("old versions stay in storage: %s", error)


def _part(folder: str, sender: int | None) -> str:
    """Returns the name of the flag with a sender's link for rank 0; without data it failed."""
    return f"stored/{folder}/{sender}"


def _num_bytes(link: weights_pb2.StoredLink) -> int:
    return sum(stored.num_bytes for stored in link.objects)


class RankObjects:
    """Takes the buckets of a version in one pass, and writes them later, on any thread.

    objects = RankObjects(buckets, sender, storage, object_bytes=64 << 20, pin=False)
    published.run(objects.take)
    link = objects.write("run/folder", digests, whole=True, until=Until(600))

    Keeps two copies of the rank's own buckets in main memory: the last written version, and the
    version to write next. After a failed `write` the next `write` must be whole.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        sender: int,
        storage: Storage,
        *,
        object_bytes: int,
        pin: bool,
    ) -> None:
        """Allocates two copies, in main memory, of the buckets that rank `sender` sends.

        The copy that a GPU writes is pinned if `pin`. An object has at most `object_bytes` bytes,
        unless a single bucket is larger.
        """
        self._buckets = tuple(buckets)
        self._sender = sender
        self._storage = storage
        self._object_bytes = object_bytes
        own_buckets = {
            place: bucket for place, bucket in enumerate(buckets) if bucket.root == sender
        }
        self._taken = {
            place: torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=pin)
            for place, bucket in own_buckets.items()
        }
        self._written = {place: np.zeros_like(data.numpy()) for place, data in self._taken.items()}
        self._gaps = {place: gap_bytes(bucket) for place, bucket in own_buckets.items()}

    def take(self, place: int, bucket: Bucket, data: Tensor) -> None:
        """Copies a bucket of this rank to main memory on the current stream; this is a `Send`."""
        if bucket.root == self._sender:
            self._taken[place].copy_(data, non_blocking=True)

    def write(
        self, folder: str, digests: Sequence[bytes], *, whole: bool, until: Until
    ) -> weights_pb2.StoredLink:
        """Writes the version that was taken last, whole or as changes since the last `write`.

        `digests` has the digests of all buckets, of other ranks too. Returns the rank's objects
        and, unless `whole`, the number of changed elements of each bucket. Raises WeightSyncError
        if the storage fails or `until` ends.
        """
        link = weights_pb2.StoredLink(bucket_digests=digests)
        changed = [0] * len(self._buckets)
        waiting: dict[int, memoryview] = {}
        for place, values in self._taken.items():
            bucket = self._buckets[place]
            written = self._written[place]
            data = values.numpy()
            data[self._gaps[place]] = 0
            elements = data.view(np.uint16)
            places = np.flatnonzero(elements != written.view(np.uint16))
            # The next call compares with these bytes.
            written[:] = data
            changed[place] = len(places)
            part = data.data
            if not whole and not travels_whole(bucket, len(places)):
                part = memoryview(payload_of(elements, places, bucket))
            if waiting and sum(map(len, waiting.values())) + len(part) > self._object_bytes:
                link.objects.append(
                    self._put(
                        folder,
                        len(link.objects),
                        waiting,
                        until,
                    )
                )
                waiting = {}
            waiting[place] = part
        if waiting:
            link.objects.append(
                self._put(
                    folder,
                    len(link.objects),
                    waiting,
                    until,
                )
            )
        if not whole:
            link.delta.changed.extend(changed)
        return link

    def _put(
        self, folder: str, number: int, parts: Mapping[int, memoryview], until: Until
    ) -> weights_pb2.StoredObject:
        data = memoryview(b"".join(parts.values()))
        key = f"{folder}/{self._sender}-{number:05d}"
        self._storage.write(key, data, until)
        return weights_pb2.StoredObject(
            key=key, num_bytes=len(data), digest=object_digest(data), buckets=parts
        )


def writer(
    config: Config, policy: Policy, published: Published, client: ControllerClient
) -> StorageWriter:
    """Returns the writer of a run's versions; raises ConfigError if fsspec cannot open the URL."""
    return StorageWriter(published, config.weights, ranks=policy.ranks, client=client)
