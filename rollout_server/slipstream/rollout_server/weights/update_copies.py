"""Updates that a copy plan loads: received whole beforehand, or copied bucket by bucket.

`Staging` receives a whole update while the old weights serve. Consumes: buckets. Produces: all of
them and their digests. Waits for: each bucket, on a thread. Unblocked by: the bytes, or the
bucket's deadline.

`Copying` copies one update in two calls, of which the first never waits. Consumes: the buckets of a
receiver, or staged buckets. Produces: copies, one digest for each bucket. Waits for: the device,
and for buckets unless the receiver only enqueues. Unblocked by: the bytes, or the bucket's
deadline.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.machine.memory import free_memory
from slipstream.rollout_server.weights.bucket_receiver import BucketReceiver, Incoming

# Parts of a device's memory that staged weights leave free for other allocations.
_LEFT_ON_GPU, _LEFT_ON_CPU = 0.02, 0.1
_ALIGNMENT_BYTES = 512


class Staging:
    """Receives updates on a thread: call `begin`, `is_done` until it returns True, `clear`.

    Its memory grows to the size of the largest update and is reused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._memory: torch.Tensor | None = None
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
        """Whether an update is arriving or has arrived."""
        return self._thread is not None

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that are kept for the next update."""
        return 0 if self._memory is None else self._memory.numel()

    def begin(self, receiver: BucketReceiver, incoming: Incoming) -> None:
        """Starts to receive an update, each bucket into its own memory."""
        self._error = None
        self._thread = threading.Thread(
            target=self._receive, args=(receiver, incoming), name="weight-staging", daemon=True
        )
        self._thread.start()

    def is_done(self) -> bool:
        """Returns whether all buckets have arrived. Raises WeightSyncError if receiving failed."""
        assert self._thread is not None
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise WeightSyncError(str(self._error)) from self._error
        return True

    def clear(self) -> None:
        """Drops the update; if it is still arriving, its thread ends by the buckets' deadlines."""
        if self._thread is not None and self._thread.is_alive():
            # That thread may still write to the memory.
            self._memory = None
        self._thread, self.buffers = None, ()

    def _receive(self, receiver: BucketReceiver, incoming: Incoming) -> None:
        buffers: list[torch.Tensor] = []
        digests: list[bytes] = []
        failure: Exception | None = None
        try:
            with self._own_stream():
                memory = self._rooms([bucket.num_bytes for bucket in incoming.buckets])
                buffers += receiver.receive(replace(incoming, memory=memory))
                # Waits for the device: afterwards any stream may read the buffers.
                digests += receiver.digests()
        except Exception as error:  # noqa: BLE001 - raised by `is_done`, in the worker's thread
            failure = error
        # An update that was forgotten meanwhile leaves no result.
        if self._thread is threading.current_thread():
            self.buffers, self.digests, self._error = buffers, digests, failure

    def _rooms(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns a buffer of each size, all cut from one allocation."""
        padded = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        *starts, total = accumulate(padded, initial=0)
        memory = self._memory
        if memory is None or memory.numel() < total:
            # The old memory is freed first.
            memory = self._memory = None
            memory = torch.empty(total, dtype=torch.uint8, device=self._device)
            if self._thread is threading.current_thread():
                self._memory = memory
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _own_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(self._stream)


def room(device: torch.device, held_bytes: int, num_workers: int) -> int:
    """Returns the bytes that one worker may stage, including `held_bytes` that it has allocated.

    On a CPU the workers of an engine share main memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free + held_bytes - _LEFT_ON_GPU * total)
    free, total = free_memory()
    return int((free - _LEFT_ON_CPU * total) / num_workers) + held_bytes


# Copies the bucket of this number to its destination, on the current stream.
Take = Callable[[int, torch.Tensor], None]


class Copying:
    """Copies one update: call `begin`, which is optional, then `finish`."""

    def __init__(
        self,
        take: Take,
        receiver: BucketReceiver,
        incoming: Incoming,
        staging: Staging | None,
        *,
        device: torch.device,
    ) -> None:
        """`staging` holds all buckets already; it is None if they come from `receiver`."""
        self._device = device
        self._take, self._receiver, self._incoming = take, receiver, incoming
        self._staging = staging
        self._started_s: float | None = None
        # Seconds until all buckets had arrived; 0 for staged ones, which are not waited for.
        self.receive_s = 0.0
        # Events on the device: after the steps under way, and after the copies.
        self._marks: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Copies the update, unless a copy would wait for a bucket: then `finish` copies all.

        Raises WeightSyncError as in `BucketReceiver.receive`.
        """
        if self._staging is not None or self._receiver.enqueues:
            self._copy()

    def finish(self) -> list[bytes]:
        """Copies unless `begin` did; when all buckets have arrived, returns their digests.

        Raises WeightSyncError after a missed deadline.
        """
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
        """Returns the `time.perf_counter` at which the device reached the copies.

        Call it after `finish`, as soon as the device has ended its work.
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
