"""Hands weights over in two buffers that the trainer and rollout servers of one host share.

On GPUs the buffers are shared by CUDA IPC; this also works on a GPU that both sides use, where NCCL
cannot connect them. Without GPUs they are in shared memory. `protocol.weights.handover` says which
side may touch a buffer at which time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.handover import HandoverSender, Offer
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.protocol.weights.shared_buffers import SharedBuffers, make_buffers
from slipstream.v1 import weights_pb2
from torch import Tensor

NUM_BUFFERS = 2


@dataclass
class _Filling:
    """A bucket that is being copied into its buffer."""

    number: int
    done: torch.cuda.Event | None


class IpcSender:
    """See `BucketSender`; it is the only sender of its communicators.

    GPU buffers are kept when a communicator ends: a receiver that the sender no longer waits for
    may still read them.
    """

    def __init__(self, weights: WeightsSection, device: torch.device, *, num_bytes: int) -> None:
        """Takes the size of the largest bucket, `num_bytes`."""
        self._weights, self._device, self._num_bytes = weights, device, num_bytes
        self.bucket_deadline_s = weights.bucket_deadline_s
        self._shared: SharedBuffers | None = None
        self._memory: list[Tensor] = []
        self._handover: HandoverSender | None = None
        self._id: str | None = None
        # Number of buckets sent by this communicator, and the number of this update's first bucket.
        self._number = self._first = 0
        self._filling: _Filling | None = None
        self._wire_s, self._sent_bytes = 0.0, 0

    @property
    def communicator_id(self) -> str | None:
        """See `BucketSender`."""
        return self._id

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """See `BucketSender`."""
        self.abort()
        if num_senders != 1:
            raise WeightSyncError(
                f"weights.transport ipc takes all weights from one trainer rank, "
                f"but {num_senders} send: learner.parallel.pp must be 1"
            )
        self._handover = HandoverSender(self._weights.host, communicator_id)
        return weights_pb2.Communicator(
            communicator_id=communicator_id,
            transport="ipc",
            store_host=self._weights.host,
            store_port=self._handover.port,
            world_size=world_size,
            num_senders=num_senders,
        )

    def connect(
        self,
        announced: weights_pb2.Communicator,
        rank: int,
        abandoned: threading.Event | None = None,
    ) -> None:
        """See `BucketSender`."""
        assert rank == 0
        handover = self._live()
        if self._shared is None or self._device.type != "cuda":
            self._make_buffers()
        shared = self._shared
        assert shared is not None
        try:
            with self._aborting():
                handover.accept(
                    range(1, announced.world_size),
                    Offer(shared.handles, self._num_bytes),
                    self._weights.join_deadline_s,
                    abandoned,
                )
        finally:
            # Every receiver has opened the buffers; without a name nothing stays behind when this
            # process is killed.
            shared.hide()
        self._id = announced.communicator_id
        self._number = self._first = 0

    def send(self, bucket: Bucket, data: Tensor) -> Callable[[], None]:
        """See `BucketSender`: `data` is free once the current stream has run the copy."""
        handover, deadline_s = self._live(), self.bucket_deadline_s
        with self._aborting():
            # The previous bucket was copied while the caller put this bucket together.
            self._tell()
            before = self._number - NUM_BUFFERS
            started_s = time.monotonic()
            if before >= self._first:
                handover.wait_read(before, deadline_s)
            self._wire_s += time.monotonic() - started_s
        place = (self._number - self._first) % NUM_BUFFERS
        self._memory[place][: bucket.num_bytes].copy_(data, non_blocking=True)
        done = torch.cuda.current_stream().record_event() if data.is_cuda else None
        self._filling = _Filling(self._number, done)
        self._number += 1
        self._sent_bytes += bucket.num_bytes
        return lambda: None

    def finish(self) -> Wire:
        """See `BucketSender`: the seconds are the time spent waiting for receivers."""
        handover, deadline_s = self._live(), self.bucket_deadline_s
        with self._aborting():
            self._tell()
            started_s = time.monotonic()
            for number in range(max(self._first, self._number - NUM_BUFFERS), self._number):
                handover.wait_read(number, deadline_s)
            self._wire_s += time.monotonic() - started_s
        self._first = self._number
        wire, self._wire_s, self._sent_bytes = Wire(self._wire_s, self._sent_bytes), 0.0, 0
        return wire

    def abort(self) -> None:
        """See `BucketSender`."""
        if self._handover is not None:
            self._handover.close()
        self._handover = self._id = self._filling = None
        self._wire_s, self._sent_bytes = 0.0, 0

    def _live(self) -> HandoverSender:
        if self._handover is None:
            raise WeightSyncError("there is no communicator to send through")
        return self._handover

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Breaks the communicator when the block fails, so that every receiver learns of it."""
        try:
            yield
        except WeightSyncError:
            self.abort()
            raise

    def _tell(self) -> None:
        """Lets receivers read the last bucket as soon as its copy is done."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        if filling.done is not None:
            until_s = time.monotonic() + self.bucket_deadline_s
            # The loop does not sleep: a sleep would take longer than the copy.
            while not filling.done.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > until_s:
                    raise WeightSyncError(
                        f"bucket {filling.number} was not copied into its buffer within "
                        f"{self.bucket_deadline_s:g} s"
                    )
        self._live().filled(filling.number)

    def _make_buffers(self) -> None:
        """Makes new buffers; in main memory for each communicator, as names do not outlive one."""
        gpu = self._device.index if self._device.type == "cuda" else None
        # Old buffers are freed first, unless a receiver holds them: two sets may not fit in memory.
        self._shared, self._memory = None, []
        self._shared = make_buffers(NUM_BUFFERS, self._num_bytes, gpu)
        self._memory = [torch.as_tensor(each, device=self._device) for each in self._shared.arrays]
