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
from slipstream.rollout_server.bucket_transport import BucketTransport, Incoming


class Staging:
    """One update; `incoming` has buffers of its own. On a GPU it has a stream of its own."""

    def __init__(
        self, transport: BucketTransport, incoming: Incoming, device: torch.device
    ) -> None:
        self._transport, self._incoming, self._device = transport, incoming, device
        self._error: Exception | None = None
        self.buffers: Sequence[torch.Tensor] = ()
        self.digests: Sequence[bytes] = ()
        self._thread = threading.Thread(target=self._receive, name="weight-staging", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether all has arrived; WeightSyncError when it will not."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise WeightSyncError(str(self._error)) from self._error
        return True

    def _receive(self) -> None:
        try:
            with self._own_stream():
                buffers = list(self._transport.receive(self._incoming))
                # Waits for the device: afterwards any stream may read the buffers.
                self.digests = self._transport.digests()
                self.buffers = buffers
        except Exception as error:  # noqa: BLE001 - raised by `is_done`, in the worker's thread
            self._error = error

    def _own_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        torch.cuda.set_device(self._device)
        # The engine computes on the default stream, which must not wait for a bucket.
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
