"""Sends buckets from GPU to GPU over NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.bucket_sender import BucketSender, live
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.cupy_nccl import CupyNccl, make_unique_id
from slipstream.protocol.weights.nccl_group import NcclGroup, Wire
from slipstream.v1 import weights_pb2
from torch import Tensor


class NcclSender(BucketSender):
    """Sends from GPU to GPU; enqueues each bucket behind the work that fills it."""

    transport = "nccl"

    def __init__(
        self,
        weights: WeightsSection,
        backend: CupyNccl,
        stream: CudaStream,
        *,
        make_unique_id: Callable[[], bytes],
    ) -> None:
        super().__init__(weights)
        self._backend, self._stream = backend, stream
        self._make_unique_id = make_unique_id
        # NCCL listens for the members of each id that was made, on a thread and a socket that end
        # when all members have joined. An id with which this rank never joined is kept for the next
        # communicator.
        self._unused_id: bytes | None = None
        self._group: NcclGroup | None = None

    @property
    def communicator_id(self) -> str | None:
        is_alive = self._group is not None and not self._group.is_aborted
        return self._id if is_alive else None

    def _meet(self, communicator_id: str, num_senders: int) -> dict[str, Any]:
        self._unused_id = self._unused_id or self._make_unique_id()
        return {"unique_id": self._unused_id}

    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        self.abort()
        self._unused_id = None
        self._group = NcclGroup.join(
            self._backend,
            announced.unique_id,
            rank=rank,
            world_size=announced.world_size,
            deadline_s=self._weights.join_deadline_s,
            abandoned=abandoned,
        )

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        group = live(self._group)
        self._stream.follow()
        group.broadcast(
            data.data_ptr(),
            bucket.num_bytes,
            bucket.root,
            self._stream.handle,
            deadline_s=self.bucket_deadline_s,
        )
        return self._stream.release()

    def finish(self) -> Wire:
        group = live(self._group)
        group.wait()
        return group.take_wire()

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._id = None


class CudaStream:
    """The CUDA stream on which broadcasts are enqueued."""

    def __init__(self, device: torch.device) -> None:
        # Broadcasts go before kernels that fill later buckets: while a broadcast waits for
        # processors of the GPU, the link is idle.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.handle = self._stream.cuda_stream

    def follow(self) -> None:
        """Makes later work on this stream wait for the work enqueued on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def release(self) -> Release:
        """Returns a function that makes the current stream wait for this stream's work so far."""
        sent = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(sent)


def open_nccl_sender(weights: WeightsSection, device: torch.device) -> NcclSender:
    """Returns a sender for a CUDA device."""
    return NcclSender(
        weights, CupyNccl(device.index), CudaStream(device), make_unique_id=make_unique_id
    )
