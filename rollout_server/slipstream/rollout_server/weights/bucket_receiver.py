"""How the buckets of an update reach an engine worker, and when they are copied.

`BucketReceiver` is the receiving side of a transport. With gloo and storage, buckets arrive in main
memory. With ipc, workers read buckets directly from the learner's buffers: by CUDA IPC, even if
learner and engine share one GPU, or in shared memory on CPUs. The receiver of nccl is
`slipstream.rollout_server.vllm.nccl_receiver`.

`Staging` receives a whole update while the old weights serve. `Update` copies one by a plan in two
calls, of which the first never waits. Consumes: buckets. Produces: copies, one digest for each
bucket. Waits for: the device, and on a thread or in the second call for each bucket. Unblocked by:
the bytes, or the bucket's deadline.
"""

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.access.exposure import local_address
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.digests import (
    BucketDigests,
    bucket_digest,
    load_kernel,
    open_digests,
)
from slipstream.protocol.weights.handover import HandoverReceiver
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.protocol.weights.publish_waits import result_of, started
from slipstream.protocol.weights.shared_buffers import GpuBuffers, HostBuffers, SharedBuffers
from slipstream.v1 import weights_pb2
from torch._C import _distributed_c10d as c10d


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
        return [bucket_digest(tensors) for tensors in self._digests.read(self._stream_handle())]

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
            gpu = self._device.index if self._device.type == "cuda" else None
            self._digests = open_digests(incoming.buckets, gpu)
            self._digested = incoming.buckets
        return self._digests

    def _stream_handle(self) -> int:
        """Returns the CUDA handle of the device's current stream; 0 on a CPU."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device).cuda_stream if is_cuda else 0


class HostReceiver(BucketReceiver):
    """Receives buckets in two alternating buffers in main memory; subclasses fill them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._buffers: list[torch.Tensor] = []

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        """Returns a buffer for each bucket; two buffers alternate.

        Returns [] with `own_buffers`, since `receive` then allocates memory for each bucket.
        """
        if incoming.own_buffers:
            self._buffers = []
            return []
        size = max(bucket.num_bytes for bucket in incoming.buckets)
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        return [
            self._buffers[place % 2][: bucket.num_bytes]
            for place, bucket in enumerate(incoming.buckets)
        ]

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        digests = self._open_digests(incoming)
        memory = self.prepare(incoming)
        for place, bucket in enumerate(incoming.buckets):
            buffer = memory[place] if memory else torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self._take(bucket, buffer, incoming.bucket_deadline_s)
            digests.add(place, buffer.data_ptr(), 0)
            yield incoming.memory[place].copy_(buffer) if incoming.memory else buffer

    def _take(self, bucket: Bucket, buffer: torch.Tensor, deadline_s: float) -> None:
        """Fills `buffer` with the next bucket. Raises WeightSyncError after `deadline_s`."""
        raise NotImplementedError


class GlooReceiver(HostReceiver):
    """A `BucketReceiver` over gloo: the sender of each bucket broadcasts it; `receive` blocks."""

    def __init__(
        self, where: weights_pb2.Communicator, rank: int, deadline_s: float, device: torch.device
    ) -> None:
        """Joins the communicator. Raises WeightSyncError when a member misses the deadline."""
        super().__init__()
        timeout = timedelta(seconds=deadline_s)
        try:
            self._store: c10d.Store | None = c10d.TCPStore(
                where.store_host,
                where.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            )
            meeting = c10d.PrefixStore(where.communicator_id, self._store)
            host = local_address(where.store_host, where.store_port)
            options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            # torch gives the class no public stub.
            self._group: Any = c10d.ProcessGroupGloo(meeting, rank, where.world_size, options)
        except RuntimeError as error:
            raise WeightSyncError(
                f"could not join communicator {where.communicator_id} "
                f"within {deadline_s:g} s: {error}"
            ) from error

    def close(self) -> None:
        """Leaves the communicator.

        The other members notice the closed connections at once. But if a thread waits for a bucket,
        it and the other members wait until the bucket's deadline: gloo has no abort.
        """
        self._group = self._store = None

    def _take(self, bucket: Bucket, buffer: torch.Tensor, deadline_s: float) -> None:
        group = self._group
        deadline = timedelta(seconds=deadline_s)
        if group is None:
            raise WeightSyncError("the communicator was left")
        options = c10d.BroadcastOptions()
        options.rootRank = bucket.root
        options.rootTensor = 0
        options.timeout = deadline
        try:
            group.broadcast([buffer], options).wait(deadline)
        except RuntimeError as error:
            raise WeightSyncError(
                f"a bucket of {bucket.num_bytes} bytes did not arrive "
                f"within {deadline_s:g} s: {error}"
            ) from error


class StorageReceiver(HostReceiver):
    """A `BucketReceiver` of files; every worker of the engine reads the same file."""

    def __init__(
        self, where: weights_pb2.Communicator, rank: int, deadline_s: float, device: torch.device
    ) -> None:
        """Opens the file that `where` names. Raises WeightSyncError if the file is missing."""
        super().__init__()
        if not where.path:
            raise WeightSyncError("weights from storage were ordered, but none were fetched")
        try:
            self._file: int | None = os.open(where.path, os.O_RDONLY)
        except OSError as error:
            cause = f"the fetched weights in {where.path} are gone: {error}"
            raise WeightSyncError(cause) from error
        self._next = 0

    def close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            os.close(file)

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        self._next = 0
        return super().receive(incoming)

    def _take(self, bucket: Bucket, buffer: torch.Tensor, deadline_s: float) -> None:
        if self._file is None:
            raise WeightSyncError("the fetched weights were closed")
        view = memoryview(buffer.numpy().data)
        while view:
            count = os.preadv(self._file, [view], self._next)
            if not count:
                raise WeightSyncError(f"the fetched weights end at byte {self._next}")
            view = view[count:]
            self._next = self._next + count


_CLOSE_LIMIT_S = 5.0


class IpcReceiver(BucketReceiver):
    """A `BucketReceiver` over ipc; the buckets of an update use the learner's buffers in turn."""

    def __init__(
        self, where: weights_pb2.Communicator, rank: int, deadline_s: float, device: torch.device
    ) -> None:
        """Joins the communicator and opens the learner's buffers.

        Raises WeightSyncError when that fails or misses the deadline.
        """
        super().__init__(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # The kernel is loaded here, before the other members wait for this one.
            load_kernel(device.index)
        self._link = HandoverReceiver(where.store_host, where.communicator_id, rank, deadline_s)
        with contextlib.ExitStack() as stack:
            stack.callback(self._link.close)
            handles = self._link.handles
            num_bytes = self._link.num_bytes
            self._buffers: SharedBuffers = (
                GpuBuffers.open(handles, num_bytes, device.index)
                if device.type == "cuda"
                else HostBuffers.open(handles, num_bytes)
            )
            stack.callback(self._buffers.close)
            self._memory = [torch.as_tensor(array, device=device) for array in self._buffers.arrays]
            self._link.opened()
            # The link and the buffers stay open.
            stack.pop_all()
        # Held while a thread copies a bucket into its own memory: another thread may call `close`.
        self._copying = threading.Lock()
        # The number of buckets that were read since the communicator was made.
        self._number = 0

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        """Returns the learner's buffer of each bucket, or [] with `own_buffers`.

        Raises WeightSyncError if a bucket is larger than the buffers.
        """
        largest = max(bucket.num_bytes for bucket in incoming.buckets)
        if largest > self._memory[0].numel():
            raise WeightSyncError(
                f"a bucket of {largest} bytes does not fit the shared buffers "
                f"of {self._memory[0].numel()}"
            )
        self._open_digests(incoming)
        if incoming.own_buffers:
            return []
        return [self._place(place, bucket) for place, bucket in enumerate(incoming.buckets)]

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        self.prepare(incoming)
        digests = self._open_digests(incoming)
        for place, bucket in enumerate(incoming.buckets):
            self._link.wait(self._number, incoming.bucket_deadline_s)
            if incoming.own_buffers:
                with self._copying:
                    data = self._place(place, bucket)
                    data = incoming.memory[place].copy_(data) if incoming.memory else data.clone()
                    digests.add(place, data.data_ptr(), self._stream_handle())
                    self._wait_done(incoming.bucket_deadline_s)
            else:
                data = self._place(place, bucket)
                digests.add(place, data.data_ptr(), self._stream_handle())
                yield data
                # The work that is enqueued so far is the last to read the buffer.
                self._wait_done(incoming.bucket_deadline_s)
            self._link.read(self._number)
            self._number += 1
            if incoming.own_buffers:
                yield data

    def close(self) -> None:
        """Leaves the communicator and unmaps the learner's buffers, which no weights refer to."""
        self._link.close()
        # Buffers that are still being read stay mapped for ever: unmapping them would break a copy.
        if self._copying.acquire(timeout=_CLOSE_LIMIT_S):
            try:
                with contextlib.suppress(WeightSyncError):
                    self._wait_done(_CLOSE_LIMIT_S)
                    self._memory = []
                    self._buffers.close()
            finally:
                self._copying.release()

    def _place(self, place: int, bucket: Bucket) -> torch.Tensor:
        if not self._memory:
            raise WeightSyncError("the communicator was left")
        return self._memory[place % len(self._memory)][: bucket.num_bytes]

    def _wait_done(self, deadline_s: float) -> None:
        """Waits for the current stream's work. Raises WeightSyncError after the deadline.

        Polls without sleeping: the work takes a fraction of a millisecond, less than a sleep.
        """
        if self._device.type != "cuda":
            return
        done = torch.cuda.current_stream().record_event()
        until_s = time.monotonic() + deadline_s
        while not done.query():
            if time.monotonic() > until_s:
                raise WeightSyncError(f"a bucket was not copied within {deadline_s:g} s")


# The buffers and the digests of all buckets of an update.
Arrived: TypeAlias = tuple[Sequence[torch.Tensor], list[bytes]]
_ALIGNMENT_BYTES = 512


class Staging:
    """Receives updates on a thread, beside the weights that serve.

    Its memory grows to the size of the largest update and is reused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The allocation of all buffers, or nothing.
        self._memory: list[torch.Tensor] = []
        # The engine computes on the default stream, which must not wait for a bucket. All updates
        # share this stream: torch's allocator gives a stream's memory to no other stream.
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    @property
    def held_bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def begin(self, receiver: BucketReceiver, incoming: Incoming) -> Future[Arrived]:
        """Starts to receive an update, each bucket into its own part of the memory."""
        memory = self._memory

        def receive() -> Arrived:
            with contextlib.ExitStack() as stack:
                if self._stream is not None:
                    torch.cuda.set_device(self._device)
                    stack.enter_context(torch.cuda.stream(self._stream))
                # A buffer for each bucket, all cut from one allocation.
                sizes = [bucket.num_bytes for bucket in incoming.buckets]
                *starts, total = accumulate(
                    (-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes), initial=0
                )
                if not memory or memory[0].numel() < total:
                    # The old memory is freed first.
                    memory.clear()
                    memory.append(torch.empty(total, dtype=torch.uint8, device=self._device))
                rooms = [
                    memory[0][start : start + size]
                    for start, size in zip(starts, sizes, strict=True)
                ]
                buffers = list(receiver.receive(replace(incoming, memory=rooms)))
                # Waits for the device: afterwards any stream may read the buffers.
                return buffers, receiver.digests()

        return started(receive, name="weight-staging")

    def abandon(self, arriving: Future[Arrived]) -> None:
        """Leaves an update's memory to its thread, which ends by the buckets' deadlines."""
        if not arriving.done():
            self._memory = []


# Copies the bucket of this number to its destination, on the current stream.
Take = Callable[[int, torch.Tensor], None]


class Update:
    """One update: call `prepare` until it is ready, `begin`, which is optional, and `finish`."""

    # Set when all buckets can be received, or have been staged.
    receiver: BucketReceiver | None = None
    # When it began to be loaded, on the monotonic clock; 0 before.
    started_s = 0.0
    # Seconds until all buckets had arrived; 0 for staged ones, which are not waited for.
    receive_s = 0.0
    digests: Sequence[bytes] = ()

    def __init__(
        self, incoming: Incoming, staging: Staging | None, take: Take, device: torch.device
    ) -> None:
        """`staging` takes all buckets beforehand; it is None if they come while they are copied."""
        self.incoming = incoming
        self.staging = staging
        self._take = take
        self._device = device
        self._arriving: Future[Arrived] | None = None
        # Events on the device: after the steps under way, and after the copies.
        self._marks: list[torch.cuda.Event] = []

    def prepare(self, receiver: BucketReceiver) -> Sequence[torch.Tensor] | None:
        """Returns the buffers of the buckets, if known, as soon as the update is ready, else None.

        Raises WeightSyncError if a staged bucket did not arrive.
        """
        memory = receiver.prepare(self.incoming)
        if self.staging is not None:
            if self._arriving is None:
                self._arriving = self.staging.begin(receiver, self.incoming)
            if not self._arriving.done():
                return None
            memory, _ = result_of(self._arriving)
        self.receiver = receiver
        return memory

    def begin(self) -> None:
        """Copies the update, unless a copy would wait for a bucket: then `finish` copies all.

        Raises WeightSyncError as in `BucketReceiver.receive`.
        """
        assert self.receiver is not None
        if self._arriving is not None or self.receiver.enqueues:
            self._copy(self.receiver)

    def finish(self) -> None:
        """Copies unless `begin` did; returns when all buckets have arrived.

        Raises WeightSyncError after a missed deadline.
        """
        assert self.receiver is not None
        if not self.started_s:
            self._copy(self.receiver)
        if self._arriving is not None:
            _, self.digests = self._arriving.result()
        else:
            self.digests = self.receiver.digests()
            self.receive_s = time.perf_counter() - self.started_s
        self._mark()

    def began_s(self) -> float:
        """Returns when the device came to the copies; call it as soon as they have ended."""
        if not self._marks:
            return self.started_s
        first, last = self._marks
        return time.perf_counter() - 1e-3 * float(first.elapsed_time(last))

    def following(self) -> "Update | None":
        """Returns an update like this one, which is ready; None after a staged one."""
        if self.staging is not None:
            return None
        update = Update(self.incoming, None, self._take, self._device)
        update.receiver = self.receiver
        return update

    def abandon(self) -> None:
        """Drops the update, which may be arriving still."""
        if self.staging is not None and self._arriving is not None:
            self.staging.abandon(self._arriving)

    def _copy(self, receiver: BucketReceiver) -> None:
        self.started_s = time.perf_counter()
        self._mark()
        arriving = self._arriving
        buffers = receiver.receive(self.incoming) if arriving is None else arriving.result()[0]
        for place, buffer in enumerate(buffers):
            self._take(place, buffer)

    def _mark(self) -> None:
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append(mark)
