"""One update that is copied by a plan, in two calls: the part that never waits, then the rest.

Consumes: the buckets of a receiver, or staged ones. Produces: copies, one digest for each bucket.
Waits for: the device, in `finish` alone where the receiver enqueues. Unblocked by: the bytes, or
the deadline of a bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from slipstream.rollout_server.weights.bucket_receiver import BucketReceiver, Incoming
from slipstream.rollout_server.weights.staging import Staging

# Copies the bucket of this number to its destination, on the current stream.
Take = Callable[[int, torch.Tensor], None]


class Copying:
    """Copies one update: `begin`, which may be left out, then `finish`."""

    def __init__(
        self,
        take: Take,
        receiver: BucketReceiver,
        incoming: Incoming,
        staging: Staging | None,
        *,
        device: torch.device,
    ) -> None:
        """`staging`: holds all buckets already; None: they come from `receiver`."""
        self._device = device
        self._take, self._receiver, self._incoming = take, receiver, incoming
        self._staging = staging
        self._started_s: float | None = None
        # Seconds until all buckets had arrived; 0 for staged ones, which are not waited for.
        self.receive_s = 0.0
        # Marks on the device: behind the steps under way, and behind the copies.
        self._marks: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Makes copies that wait for nothing; WeightSyncError as in `BucketReceiver.receive`."""
        if self._staging is not None or self._receiver.enqueues:
            self._copy()

    def finish(self) -> list[bytes]:
        """Returns the digests when all has arrived; WeightSyncError after a missed deadline."""
        if self._started_s is None:
            self._copy()
        if self._staging is not None:
            self._mark()
            return self._staging.digests
        digests = self._receiver.digests()
        self.receive_s = self.seconds()
        self._mark()
        return digests

    def began_s(self) -> float:
        """Returns when the device came to the copies, on the monotonic clock.

        Call it when `finish` has returned and the device has just ended its work.
        """
        assert self._started_s is not None
        if not self._marks:
            return self._started_s
        first, last = self._marks
        return time.perf_counter() - 1e-3 * float(first.elapsed_time(last))

    def seconds(self) -> float:
        """Returns the seconds since the first copy began."""
        assert self._started_s is not None
        return time.perf_counter() - self._started_s

    def _copy(self) -> None:
        self._started_s = time.perf_counter()
        self._mark()
        staging = self._staging
        arriving = self._receiver.receive(self._incoming) if staging is None else staging.buffers
        for place, buffer in enumerate(arriving):
            self._take(place, buffer)

    def _mark(self) -> None:
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append(mark)
