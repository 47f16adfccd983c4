"""The receiving side of a transport: how buckets reach an engine worker."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.digests import BucketDigests, HostDigests, bucket_digest
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import weights_pb2


@dataclass(frozen=True)
class Seat:
    """The rank of this worker in a communicator, and the data with which the worker joins it."""

    communicator: weights_pb2.Communicator
    rank: int
    join_deadline_s: float


@dataclass(frozen=True)
class Incoming:
    """The description of one weight update that a transport's receiver needs.

    With `own_buffers` every bucket gets memory that is never written again; otherwise a bucket is
    valid until the next one is requested. `memory` has a buffer for each bucket; if it is empty,
    the receiver allocates buffers.
    """

    buckets: tuple[Bucket, ...]
    bucket_deadline_s: float
    own_buffers: bool
    memory: Sequence[torch.Tensor] = ()


class BucketReceiver(ABC):
    """One member of a communicator, on the receiving side."""

    # Whether `receive` only enqueues on the device: iterating over it then waits for nothing.
    enqueues: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        """Takes the device on which buckets arrive."""
        self._device = device
        self._digests: BucketDigests | None = None
        # The buckets of `_digests`.
        self._digested: tuple[Bucket, ...] = ()

    @abstractmethod
    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        """Prepares to receive while generation continues.

        Returns the buffer of each bucket in order, or an empty sequence if they are not yet known.
        """

    @abstractmethod
    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        """Yields each bucket in order, in a uint8 tensor of its size, valid on the current stream.

        Work that the caller enqueues on the current stream before it asks for the next bucket is
        done before the memory is written again. Raises WeightSyncError when a bucket misses its
        deadline; a transport with its own stream may notice that only in `digests`.
        """

    def digests(self) -> list[bytes]:
        """Returns the digests of the last `receive`, after its end; waits for all its buckets."""
        assert self._digests is not None
        handle = stream_handle(self._device)
        return [bucket_digest(tensors) for tensors in self._digests.read(handle)]

    def take_wire(self) -> Wire:
        """Returns seconds and bytes of the last `receive`'s broadcasts; both are 0 if unknown.

        Call it after `digests`.
        """
        return Wire()

    @abstractmethod
    def close(self) -> None:
        """Leaves the communicator, even if its other members are gone."""

    def _open_digests(self, incoming: Incoming) -> BucketDigests:
        """Returns the object that computes an update's digests; reuses it for the same buckets."""
        if self._digests is None or self._digested != incoming.buckets:
            self._digests = open_digests(incoming.buckets, self._device)
            self._digested = incoming.buckets
        return self._digests


def stream_handle(device: torch.device) -> int:
    """Returns the CUDA handle of the device's current stream, as an integer; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def open_digests(buckets: tuple[Bucket, ...], device: torch.device) -> BucketDigests:
    """Returns an object that computes the digests of `buckets`, whose data are on `device`."""
    if device.type != "cuda":
        return HostDigests(buckets)
    from slipstream.protocol.weights.digests import CudaDigests

    with torch.cuda.device(device):
        return CudaDigests(buckets)
