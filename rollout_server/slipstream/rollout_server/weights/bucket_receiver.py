"""How buckets reach an engine worker: what every transport offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import weights_pb2


@dataclass(frozen=True)
class Membership:
    """A communicator and this worker's rank in it."""

    communicator: weights_pb2.Communicator
    rank: int
    join_deadline_s: float


@dataclass(frozen=True)
class Incoming:
    """One update, as its transport sees it.

    `own_buffers`: every bucket lies in memory that is never written again. Otherwise a bucket is
    valid until the next one is asked for.
    """

    buckets: tuple[Bucket, ...]
    bucket_deadline_s: float
    own_buffers: bool


class BucketReceiver(Protocol):
    """One member of a communicator, on the receiving side."""

    # `receive` only enqueues on the device: who iterates over it waits for nothing.
    enqueues: bool

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        """Makes everything ready while generation still goes on.

        Returns the memory of each bucket in order, as far as it is known beforehand.
        """
        ...

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        """Each bucket in order, in a uint8 tensor of its size, valid on the current stream.

        Work that the caller puts on the current stream before it asks for the next bucket is done
        before the memory is written again. WeightSyncError when a bucket misses its deadline; a
        transport with a stream of its own may notice that only in `digests`.
        """
        ...

    def digests(self) -> list[bytes]:
        """Of the buckets of the last `receive`, after its end; waits until all have arrived."""
        ...

    def take_wire(self) -> Wire:
        """Of the last `receive`, after `digests`; of no time where broadcasts cannot be timed."""
        ...

    def close(self) -> None:
        """Leaves the communicator, also when its other members are gone."""
        ...
