"""Stores the buckets of one sending rank as objects in object storage."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from slipstream.extensions.stored_weights.deltas import gap_bytes, payload_of, travels_whole
from slipstream.extensions.stored_weights.storage import Storage, Until
from slipstream.protocol.weights.buckets import Bucket
from slipstream.v1 import weights_pb2
from torch import Tensor

OBJECT_DIGEST_BYTES = 32


def object_digest(data: bytes | memoryview) -> bytes:
    """Returns the digest of an object's bytes, which every reference to the object contains."""
    return hashlib.blake2b(data, digest_size=OBJECT_DIGEST_BYTES).digest()


class RankObjects:
    """Takes the buckets of a version in one pass, and writes them later, on any thread.

    objects = RankObjects(buckets, sender, storage, object_bytes=64 << 20, pin=False)
    published.run(objects.take)
    link = objects.write("run/folder", digests, whole=True, until=Until.after(600))

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
        self._buckets, self._sender, self._storage = tuple(buckets), sender, storage
        self._object_bytes = object_bytes
        own = {place: bucket for place, bucket in enumerate(buckets) if bucket.root == sender}
        self._taken = {
            place: torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=pin)
            for place, bucket in own.items()
        }
        self._written = {place: np.zeros_like(data.numpy()) for place, data in self._taken.items()}
        self._gaps = {place: gap_bytes(bucket) for place, bucket in own.items()}

    def take(self, place: int, bucket: Bucket, data: Tensor) -> Callable[[], None]:
        """Implements `Send`: copies a bucket of this rank to main memory on the current stream."""
        if bucket.root == self._sender:
            self._taken[place].copy_(data, non_blocking=True)
        return nothing

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
        waiting: dict[int, bytes | memoryview] = {}
        for place in self._taken:
            changed[place], data = self._encoded(place, whole=whole)
            if waiting and sum(map(len, waiting.values())) + len(data) > self._object_bytes:
                link.objects.append(self._put(folder, len(link.objects), waiting, until))
                waiting = {}
            waiting[place] = data
        if waiting:
            link.objects.append(self._put(folder, len(link.objects), waiting, until))
        if not whole:
            link.delta.changed.extend(changed)
        return link

    def _encoded(self, place: int, *, whole: bool) -> tuple[int, bytes | memoryview]:
        """Returns a bucket's number of elements changed since the last call, and its payload.

        The payload is all of the bucket's bytes if `whole` or if `travels_whole` says so, else a
        delta. The next call compares with the present bytes.
        """
        bucket, written = self._buckets[place], self._written[place]
        data = self._taken[place].numpy()
        data[self._gaps[place]] = 0
        places = np.flatnonzero(data.view(np.uint16) != written.view(np.uint16))
        written[:] = data
        if whole or travels_whole(bucket, len(places)):
            return len(places), data.data
        return len(places), payload_of(data.view(np.uint16), places, bucket)

    def _put(
        self, folder: str, number: int, parts: Mapping[int, bytes | memoryview], until: Until
    ) -> weights_pb2.StoredObject:
        data = memoryview(b"".join(parts.values()))
        key = f"{folder}/{self._sender}-{number:05d}"
        self._storage.write(key, data, until)
        return weights_pb2.StoredObject(
            key=key, num_bytes=len(data), digest=object_digest(data), buckets=parts
        )


def nothing() -> None:
    """Does nothing; this is the `Release` of a copy whose lane is refilled on the same stream."""
