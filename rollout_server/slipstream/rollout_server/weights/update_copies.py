"""Updates that a copy plan loads: received whole beforehand, or copied bucket by bucket.

`Staging` receives a whole update while the old weights serve. Consumes: buckets. Produces: all of
them and their digests. Waits for: each bucket, on a thread. Unblocked by: the bytes, or the
bucket's deadline.

`Update` copies one update in two calls, of which the first never waits. Consumes: the buckets of a
receiver, or staged buckets. Produces: copies, one digest for each bucket. Waits for: the device,
and for buckets unless the receiver only enqueues. Unblocked by: the bytes, or the bucket's
deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum
from itertools import accumulate

import torch
from slipstream.core.machine.description import free_memory
from slipstream.protocol.weights.waits import result_of, started
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
        # What arrives on a thread: the buffers and the digests of all buckets.
        self._arriving: Future[tuple[list[torch.Tensor], list[bytes]]] | None = None
        # The allocation of all buffers, or nothing.
        self._memory: list[torch.Tensor] = []
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
        return self._arriving is not None

    @property
    def held_bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def begin(self, receiver: BucketReceiver, incoming: Incoming) -> None:
        """Starts to receive an update, each bucket into its own memory."""
        memory = self._memory

        def receive() -> tuple[list[torch.Tensor], list[bytes]]:
            with self._own_stream():
                rooms = self._rooms(memory, [bucket.num_bytes for bucket in incoming.buckets])
                buffers = list(receiver.receive(replace(incoming, memory=rooms)))
                # Waits for the device: afterwards any stream may read the buffers.
                return buffers, receiver.digests()

        self._arriving = started(receive, name="weight-staging")

    def is_done(self) -> bool:
        """Returns whether all buckets have arrived. Raises WeightSyncError if receiving failed."""
        assert self._arriving is not None
        if not self._arriving.done():
            return False
        self.buffers, self.digests = result_of(self._arriving)
        return True

    def clear(self) -> None:
        """Drops the update; if it is still arriving, its thread ends by the buckets' deadlines."""
        if self._arriving is not None and not self._arriving.done():
            # That thread may still write to the memory.
            self._memory = []
        self._arriving, self.buffers = None, ()

    def _rooms(self, memory: list[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns a buffer of each size, all cut from the one allocation that `memory` holds."""
        padded = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        *starts, total = accumulate(padded, initial=0)
        if not memory or memory[0].numel() < total:
            # The old memory is freed first.
            memory.clear()
            memory.append(torch.empty(total, dtype=torch.uint8, device=self._device))
        return [memory[0][start : start + size] for start, size in zip(starts, sizes, strict=True)]

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


class Phase(Enum):
    """The phases of an update."""

    # Its communicator is being joined, or its buckets arrive while the old weights serve.
    PREPARING = "preparing"
    # Its buckets can be received, or have all arrived.
    READY = "ready"
    # It is being copied by a plan, or else loaded by vLLM's loader.
    COPYING = "copying"
    LOADING = "loading"


class Update:
    """One update from its preparation to its last bucket; `begin` and `finish` copy it.

    `begin` is optional, and never waits.
    """

    # Set from READY on.
    receiver: BucketReceiver

    def __init__(
        self, incoming: Incoming, staging: Staging | None, take: Take, device: torch.device
    ) -> None:
        """`staging` takes all buckets beforehand; it is None if they come while they are copied."""
        self.incoming, self.staging = incoming, staging
        self._take, self._device = take, device
        self.phase = Phase.PREPARING
        self._started_s: float | None = None
        # Seconds until all buckets had arrived; 0 for staged ones, which are not waited for.
        self.receive_s = 0.0
        # Events on the device: after the steps under way, and after the copies.
        self._marks: list[torch.cuda.Event] = []

    def prepare(self, receiver: BucketReceiver) -> Sequence[torch.Tensor] | None:
        """Returns the buffers of the buckets, if known, as soon as the update is READY, else None.

        Raises WeightSyncError if a staged bucket did not arrive.
        """
        memory = receiver.prepare(self.incoming)
        if self.staging is not None:
            if not self.staging.is_begun:
                self.staging.begin(receiver, self.incoming)
            if not self.staging.is_done():
                return None
            memory = self.staging.buffers
        self.receiver, self.phase = receiver, Phase.READY
        return memory

    def begin(self) -> None:
        """Copies the update, unless a copy would wait for a bucket: then `finish` copies all.

        Raises WeightSyncError as in `BucketReceiver.receive`.
        """
        self.phase = Phase.COPYING
        if self.staging is not None or self.receiver.enqueues:
            self._copy()

    def finish(self) -> list[bytes]:
        """Copies unless `begin` did; when all buckets have arrived, returns their digests.

        Raises WeightSyncError after a missed deadline.
        """
        if self._started_s is None:
            self._copy()
        if self.staging is not None:
            self._mark()
            return self.staging.digests
        digests = self.receiver.digests()
        self.receive_s = self.seconds()
        self._mark()
        return digests

    def following(self) -> Update | None:
        """Returns an update like this one, which is READY; None after a staged one."""
        if self.staging is not None:
            self.staging.clear()
            return None
        update = Update(self.incoming, None, self._take, self._device)
        update.receiver, update.phase = self.receiver, Phase.READY
        return update

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
        staging = self.staging
        arriving = self.receiver.receive(self.incoming) if staging is None else staging.buffers
        for place, buffer in enumerate(arriving):
            self._take(place, buffer)

    def _mark(self) -> None:
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append(mark)
