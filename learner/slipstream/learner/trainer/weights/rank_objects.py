"""The objects that one sending rank writes of each version: whole buckets, or what changed.

Consumes: filled buckets, which it copies to main memory. Produces: objects in storage, and a
`StoredLink` that names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from slipstream.learner.trainer.weights.delta_base import DeltaBase
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.deltas import on_the_wire
from slipstream.protocol.weights.storage import Storage, Until
from slipstream.v1 import weights_pb2
from torch import Tensor

OBJECT_DIGEST_BYTES = 32
_HOST = torch.device("cpu")


class RankObjects:
    """Takes the buckets of a version in one pass, and writes them later, on any thread.

    objects = RankObjects(buckets, sender, storage, object_bytes=64 << 20, pin=False)
    published.run(objects.take, is_publish=False)
    link = objects.write("run/folder", digests, whole=True, until=Until.after(600))

    Keeps two copies of the rank's own buckets in main memory: what it wrote last, and what it
    writes. After a failed `write` the next `write` must be whole.
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
        """`pin`: buckets come from a GPU. An object is closed at `object_bytes`."""
        self._buckets, self._sender, self._storage = tuple(buckets), sender, storage
        self._object_bytes = object_bytes
        own = [bucket.root == sender for bucket in buckets]
        self._base = DeltaBase(buckets, own, _HOST, on_host=False, encodes_early=True)
        self._taken = {
            place: torch.empty(bucket.num_bytes, dtype=torch.uint8, pin_memory=pin)
            for place, bucket in enumerate(buckets)
            if own[place]
        }

    def take(self, place: int, bucket: Bucket, data: Tensor) -> Release:
        """See `Send`: copies an own bucket on the current stream, before its lane is refilled."""
        if bucket.root == self._sender:
            self._taken[place].copy_(data, non_blocking=True)
        return _nothing

    def write(
        self, folder: str, digests: Sequence[bytes], *, whole: bool, until: Until
    ) -> weights_pb2.StoredLink:
        """Writes what was taken last; `digests` are those of all buckets of the version.

        Returns the rank's objects and the numbers of changed elements; WeightSyncError when the
        storage does not take them in time.
        """
        link = weights_pb2.StoredLink(bucket_digests=digests)
        changed = self._keep(digests) if whole else self._count()
        wires = self._buckets
        if not whole:
            link.delta.changed.extend(changed)
            wires = on_the_wire(self._buckets, changed)
        group: list[int] = []
        parts: list[Tensor] = []
        size = 0
        for place, data in self._encoded(wires, whole=whole):
            if group and size + data.numel() > self._object_bytes:
                link.objects.append(self._put(folder, len(link.objects), group, parts, until))
                group, parts, size = [], [], 0
            group, parts, size = [*group, place], [*parts, data], size + data.numel()
        if group:
            link.objects.append(self._put(folder, len(link.objects), group, parts, until))
        self._base.settle([0] * len(self._buckets), sent=digests)
        return link

    def _keep(self, digests: Sequence[bytes]) -> list[int]:
        for place, data in self._taken.items():
            self._base.keep(place, data)
        nothing_changed = [0] * len(self._buckets)
        self._base.settle(nothing_changed, sent=digests)
        return nothing_changed

    def _count(self) -> list[int]:
        for place, data in self._taken.items():
            self._base.count(place, data)
        changed = self._base.counts()
        self._base.settle(changed)
        return changed

    def _encoded(self, wires: Sequence[Bucket], *, whole: bool) -> Iterator[tuple[int, Tensor]]:
        """Yields each own bucket as it travels, and makes it the base of the next version."""
        for place, data in self._taken.items():
            size, is_whole = wires[place].num_bytes, wires[place] == self._buckets[place]
            if is_whole:
                if not whole:
                    self._base.keep(place, data)
                yield place, data
            elif self._base.has_early(place):
                yield place, self._base.take_early(place)[:size]
            else:
                self._base.encode(place, data)
                yield place, data[:size]

    def _put(
        self, folder: str, number: int, places: list[int], parts: list[Tensor], until: Until
    ) -> weights_pb2.StoredObject:
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        data = memoryview(joined.numpy().data)
        key = f"{folder}/{self._sender}-{number:05d}"
        digest = hashlib.blake2b(data, digest_size=OBJECT_DIGEST_BYTES).digest()
        self._storage.write(key, data, until)
        return weights_pb2.StoredObject(key=key, num_bytes=len(data), digest=digest, buckets=places)


def _nothing() -> None:
    """The release of a copy on the stream: the lane is refilled on the same stream."""
