"""Receives a whole update beside the weights that still serve.

Consumes: buckets. Produces: all of them, each in memory of its own, and their digests. Waits for:
each bucket, on a thread. Unblocked by: the bytes, or the deadline of the bucket.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
from slipstream.protocol.errors import WeightSyncError
from slipstream.rollout_server.weights.bucket_receiver import BucketReceiver, Incoming


class Staging:
    """Receives one update after another, each on a thread: `begin`, `is_done`, `clear`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        # The engine computes on the default stream, which must not wait for a bucket. All updates
        # share this stream: torch's allocator gives a stream's memory to no other stream.
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )
        self.buffers: Sequence[torch.Tensor] = ()
        self.digests: list[bytes] = []

    @property
    def is_begun(self) -> bool:
        """Whether an update is on its way or has arrived."""
        return self._thread is not None

    def begin(self, receiver: BucketReceiver, incoming: Incoming) -> None:
        """Receives an update, each bucket into memory of its own."""
        self._error = None
        self._thread = threading.Thread(
            target=self._receive, args=(receiver, incoming), name="weight-staging", daemon=True
        )
        self._thread.start()

    def is_done(self) -> bool:
        """Whether all buckets have arrived; WeightSyncError when they never will."""
        assert self._thread is not None
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise WeightSyncError(str(self._error)) from self._error
        return True

    def clear(self) -> None:
        """Forgets the update; the thread of one that is still on its way ends by its deadlines."""
        self._thread, self.buffers = None, ()

    def _receive(self, receiver: BucketReceiver, incoming: Incoming) -> None:
        buffers: list[torch.Tensor] = []
        digests: list[bytes] = []
        failure: Exception | None = None
        try:
            with self._own_stream():
                buffers += receiver.receive(incoming)
                # Waits for the device: afterwards any stream may read the buffers.
                digests += receiver.digests()
        except Exception as error:  # noqa: BLE001 - raised by `is_done`, in the worker's thread
            failure = error
        # An update that was forgotten meanwhile leaves no result.
        if self._thread is threading.current_thread():
            self.buffers, self.digests, self._error = buffers, digests, failure

    def _own_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(self._stream)
