"""Sends weights through two buffers that the trainer and the rollout servers of one host share.

On GPUs the buffers are shared by CUDA IPC; this also works on a GPU that both sides use, where NCCL
cannot connect them. Without GPUs they are in shared memory. `protocol.weights.handover` defines
when each side may use a buffer.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.bucket_sender import BucketSender, live
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.handover import HandoverSender, Offer
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.protocol.weights.shared_buffers import SharedBuffers, make_buffers
from slipstream.v1 import weights_pb2
from torch import Tensor

NUM_BUFFERS = 2


class IpcSender(BucketSender):
    """Sends within one host; it is the only sender of its communicators.

    GPU buffers are kept when a communicator ends: a receiver that the sender no longer waits for
    may still read them.
    """

    transport = "ipc"

    def __init__(
        self, weights: WeightsSection, device: torch.device, *, num_bytes: int, host: str
    ) -> None:
        """Takes the size of the largest bucket, `num_bytes`; listens only on `host`."""
        super().__init__(weights)
        self._host = host
        self._device, self._num_bytes = device, num_bytes
        self._shared: SharedBuffers | None = None
        self._memory: list[Tensor] = []
        self._handover: HandoverSender | None = None
        # Number of buckets sent by this communicator, and the number of this update's first bucket.
        self._number = self._first = 0
        # The bucket that is being copied into its buffer, and the end of that copy on a GPU.
        self._filling: tuple[int, torch.cuda.Event | None] | None = None
        self._wire_s, self._sent_bytes = 0.0, 0

    def _meet(self, communicator_id: str, num_senders: int) -> dict[str, Any]:
        if num_senders != 1:
            raise WeightSyncError(
                f"weights.transport ipc takes all weights from one trainer rank, "
                f"but {num_senders} send: learner.parallel.pp and ep must be 1"
            )
        self._handover = HandoverSender(self._host, communicator_id)
        return {"store_host": self._host, "store_port": self._handover.port}

    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        assert rank == 0
        handover = live(self._handover)
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
        self._number = self._first = 0

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """Implements `BucketSender.send`; the current stream copies `data` into a shared buffer."""
        handover, deadline_s = live(self._handover), self.bucket_deadline_s
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
        self._filling = self._number, done
        self._number += 1
        self._sent_bytes += bucket.num_bytes
        return lambda: None

    def finish(self) -> Wire:
        handover, deadline_s = live(self._handover), self.bucket_deadline_s
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
        if self._handover is not None:
            self._handover.close()
        self._handover = self._id = self._filling = None
        self._wire_s, self._sent_bytes = 0.0, 0

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Aborts the communicator if the block fails, so that every receiver fails too."""
        try:
            yield
        except WeightSyncError:
            self.abort()
            raise

    def _tell(self) -> None:
        """Waits until the last bucket is copied into its buffer, then lets receivers read it."""
        if self._filling is None:
            return
        (number, done), self._filling = self._filling, None
        if done is not None:
            until_s = time.monotonic() + self.bucket_deadline_s
            # The loop does not sleep: a sleep would take longer than the copy.
            while not done.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > until_s:
                    raise WeightSyncError(
                        f"bucket {number} was not copied into its buffer within "
                        f"{self.bucket_deadline_s:g} s"
                    )
        live(self._handover).filled(number)

    def _make_buffers(self) -> None:
        """Creates new shared buffers, on the GPU if there is one; drops the old buffers first.

        In main memory each communicator needs new buffers, because `_join` hides their names.
        """
        gpu = self._device.index if self._device.type == "cuda" else None
        # Old buffers are freed first, unless a receiver holds them: two sets may not fit in memory.
        self._shared, self._memory = None, []
        self._shared = make_buffers(NUM_BUFFERS, self._num_bytes, gpu)
        self._memory = [torch.as_tensor(each, device=self._device) for each in self._shared.arrays]
