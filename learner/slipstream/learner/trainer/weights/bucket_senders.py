"""The trainer's side of a communicator: from GPU to GPU by NCCL, within a host, or over TCP.

The sending trainer ranks come first in a communicator; trainer rank 0 is its rank 0 and leads. The
receivers' ranks follow. Every wait has a deadline. After an error the communicator is aborted, and
the next publish creates a new one.
"""

import contextlib
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.extension import resolve, transports
from slipstream.core.machine.address import listen
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.ranks.rendezvous import open_store
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.access.exposure import local_address
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.handover import HandoverSender
from slipstream.protocol.weights.nccl_group import NcclGroup, Wire, make_unique_id
from slipstream.protocol.weights.publish_waits import Unanswered, on_thread, reason
from slipstream.protocol.weights.shared_buffers import GpuBuffers, HostBuffers, SharedBuffers
from slipstream.v1 import weights_pb2
from torch import Tensor
from torch.distributed.distributed_c10d import Store

NUM_BUFFERS = 2
Result = TypeVar("Result")
# Seconds by which a call may outlast gloo's own deadline before its thread is left behind.
_GRACE_S = 1.0
# Messages of gloo begin with a file and line of its source, which users need not see.
_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class BucketSender(ABC):
    """Sends buckets through a communicator, which is kept until its members change or it fails.

    Call `announce` on the leader, then `connect` on every sending rank. For each publish call
    `send` for every bucket, then `finish`. `abort` ends the communicator at any time.
    """

    transport: ClassVar[str]

    def __init__(self, weights: WeightsSection) -> None:
        self._weights = weights
        # Seconds that one bucket may take; each publish sets its own.
        self.bucket_deadline_s = weights.bucket_deadline_s
        self._id: str | None = None

    @property
    def communicator_id(self) -> str | None:
        """The connected communicator's id; None before `connect` and after an error."""
        return self._id

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """Begins a new communicator on the leader; returns the address at which its members join.

        Does not wait for members. Raises ConfigError if the leader cannot listen on its host, and
        WeightSyncError if the transport does not support `num_senders`.
        """
        self.abort()
        return weights_pb2.Communicator(
            communicator_id=communicator_id,
            transport=self.transport,
            world_size=world_size,
            num_senders=num_senders,
            **self._meet(communicator_id, num_senders),
        )

    def connect(
        self,
        announced: weights_pb2.Communicator,
        rank: int,
        abandoned: threading.Event | None = None,
    ) -> None:
        """Joins a communicator as `rank`, and waits for all members.

        Raises WeightSyncError after `weights.join_deadline_s`, or soon after `abandoned` is set.
        """
        self._join(announced, rank, abandoned)
        self._id = announced.communicator_id

    @abstractmethod
    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """Begins the broadcast of a bucket from its root rank to all other members.

        The caller must not change `data` until it has called the returned `Release`, if any. Raises
        WeightSyncError if this bucket or an earlier one is not sent within `bucket_deadline_s`.
        """

    @abstractmethod
    def finish(self) -> Wire:
        """Waits until all buckets are sent, and returns the seconds and bytes of this transfer.

        A transport that does not time the transfer returns the seconds spent waiting for it. Raises
        WeightSyncError if a bucket is not sent within `bucket_deadline_s`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Aborts the communicator, so that members that wait in it fail too."""

    @abstractmethod
    def _meet(self, communicator_id: str, num_senders: int) -> dict[str, Any]:
        """Opens the members' rendezvous; returns the transport's fields of `Communicator`."""

    @abstractmethod
    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        """Connects as `connect` describes, for one transport."""


def live(joined: Result | None) -> Result:
    """Returns a sender's connection; raises WeightSyncError if it is None."""
    if joined is None:
        raise WeightSyncError("there is no communicator to send through")
    return joined


class NcclSender(BucketSender):
    """Sends from GPU to GPU; enqueues each bucket behind the work that fills it."""

    transport = "nccl"

    def __init__(self, weights: WeightsSection, device: torch.device) -> None:
        super().__init__(weights)
        self._device = device
        # Broadcasts go before kernels that fill later buckets: while a broadcast waits for
        # processors of the GPU, the link is idle.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
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
        self._unused_id = self._unused_id or make_unique_id()
        return {"unique_id": self._unused_id}

    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        self.abort()
        self._unused_id = None
        self._group = NcclGroup.join(
            self._device.index,
            announced.unique_id,
            rank=rank,
            world_size=announced.world_size,
            deadline_s=self._weights.join_deadline_s,
            abandoned=abandoned,
        )

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        group = live(self._group)
        self._stream.wait_stream(torch.cuda.current_stream())
        group.broadcast(
            data.data_ptr(),
            bucket.num_bytes,
            bucket.root,
            self._stream.cuda_stream,
            deadline_s=self.bucket_deadline_s,
        )
        sent = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(sent)

    def finish(self) -> Wire:
        group = live(self._group)
        group.wait()
        return group.take_wire()

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._id = None


class IpcSender(BucketSender):
    """Sends within one host; it is the only sender of its communicators.

    GPU buffers are kept when a communicator ends: a receiver that the sender no longer waits for
    may still read them.
    """

    transport = "ipc"

    def __init__(self, weights: WeightsSection, device: torch.device, *, num_bytes: int) -> None:
        super().__init__(weights)
        self._device = device
        self._num_bytes = num_bytes
        self._shared: SharedBuffers | None = None
        self._memory: list[Tensor] = []
        self._handover: HandoverSender | None = None
        # Number of buckets sent by this communicator, and the number of this update's first bucket.
        self._number = self._first = 0
        # The bucket that is being copied into its buffer, and the end of that copy on a GPU.
        self._filling: tuple[int, torch.cuda.Event | None] | None = None
        self._wire_s = 0.0
        self._sent_bytes = 0

    def _meet(self, communicator_id: str, num_senders: int) -> dict[str, Any]:
        if num_senders != 1:
            raise WeightSyncError(
                f"weights.transport ipc takes all weights from one trainer rank, "
                f"but {num_senders} send: learner.parallel.pp and ep must be 1"
            )
        self._handover = HandoverSender(communicator_id)
        return {"store_host": str(self._handover.path)}

    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        assert rank == 0
        handover = live(self._handover)
        if self._shared is None or self._device.type != "cuda":
            # In main memory each communicator needs new buffers, because their names are hidden.
            # Old buffers are freed first, unless a receiver holds them: two sets may not fit.
            self._shared = None
            self._memory = []
            if self._device.type == "cuda":
                self._shared = GpuBuffers.make(NUM_BUFFERS, self._num_bytes, self._device.index)
            else:
                self._shared = HostBuffers.make(NUM_BUFFERS, self._num_bytes)
            arrays = self._shared.arrays
            self._memory = [torch.as_tensor(array, device=self._device) for array in arrays]
        shared = self._shared
        try:
            with self._aborting():
                handover.accept(
                    range(1, announced.world_size),
                    shared.handles,
                    self._num_bytes,
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
        handover = live(self._handover)
        deadline_s = self.bucket_deadline_s
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
        return None

    def finish(self) -> Wire:
        handover = live(self._handover)
        deadline_s = self.bucket_deadline_s
        with self._aborting():
            self._tell()
            started_s = time.monotonic()
            for number in range(max(self._first, self._number - NUM_BUFFERS), self._number):
                handover.wait_read(number, deadline_s)
            self._wire_s += time.monotonic() - started_s
        self._first = self._number
        wire = Wire(self._wire_s, self._sent_bytes)
        self._wire_s = 0.0
        self._sent_bytes = 0
        return wire

    def abort(self) -> None:
        if self._handover is not None:
            self._handover.close()
        self._handover = self._id = self._filling = None
        self._wire_s = 0.0
        self._sent_bytes = 0

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


class GlooSender(BucketSender):
    """Sends over TCP, listening only on `host`, one bucket while the caller fills the next."""

    transport = "gloo"

    def __init__(self, weights: WeightsSection, *, host: str) -> None:
        super().__init__(weights)
        self._host = host
        # The store on the leader where all members meet. Closing it ends the waits of members
        # there.
        self._meeting_place: Store | None = None
        self._group: dist.ProcessGroupGloo | None = None
        self._under_way: tuple[dist.Work, Bucket] | None = None
        self._wire = Wire()

    def _meet(self, communicator_id: str, num_senders: int) -> dict[str, Any]:
        try:
            listener = listen(self._host)
        except OSError as error:
            raise ConfigError(
                f"learner.master must be an address of this machine, got {self._host}: {error}"
            ) from error
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=self._weights.join_deadline_s)
        self._meeting_place = open_store(self._host, port, timeout, listener.detach())
        return {"store_host": self._host, "store_port": port}

    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        if rank != 0:
            self.abort()
        timeout = timedelta(seconds=self._weights.join_deadline_s)

        def join() -> dist.ProcessGroupGloo:
            # The leader connects as a client too: a thread that is left behind must not keep the
            # leader's own store open.
            where = announced.store_host, announced.store_port
            store = open_store(*where, timeout)
            # Further senders may run on other machines than the leader.
            host = local_address(*where)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._threads = 1
            options._timeout = timeout
            meeting = dist.PrefixStore(  # type: ignore[attr-defined]
                announced.communicator_id, store
            )
            return dist.ProcessGroupGloo(meeting, rank, announced.world_size, options)

        self._group = self._within(
            self._weights.join_deadline_s,
            join,
            what=f"{announced.world_size - 1} others joining {announced.communicator_id}",
            abandoned=abandoned,
        )

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        self._settle()
        options = dist.BroadcastOptions()
        options.rootRank = bucket.root
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.bucket_deadline_s)
        work = live(self._group).broadcast([data], options)  # type: ignore[attr-defined]
        self._under_way = (work, bucket)

        def release() -> None:
            # Once a later bucket is being sent, this one is done.
            if self._under_way is not None and self._under_way[0] is work:
                self._settle()

        return release

    def finish(self) -> Wire:
        self._settle()
        wire = self._wire
        self._wire = Wire()
        return wire

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._meeting_place = self._id = self._under_way = None

    def _settle(self) -> None:
        """Waits for the bucket that is being sent, if any."""
        if self._under_way is None:
            return
        (work, bucket), self._under_way = self._under_way, None
        deadline_s = self.bucket_deadline_s
        what = (
            f"a bucket of {bucket.num_bytes} bytes from rank {bucket.root} "
            f"(weights.bucket_deadline_s = {deadline_s:g})"
        )
        started = time.monotonic()
        self._within(deadline_s, work.wait, what=what)
        # On a GPU gloo copies the bucket back on a stream of its own. `wait` makes only the current
        # stream of its thread wait for that: here the one on which the lane is filled again.
        work.wait()
        seconds = self._wire.seconds + time.monotonic() - started
        self._wire = Wire(seconds, self._wire.num_bytes + bucket.num_bytes)

    def _within(
        self,
        deadline_s: float,
        work: Callable[[], Result],
        *,
        what: str,
        abandoned: threading.Event | None = None,
    ) -> Result:
        """Runs `work` in a thread and returns its result.

        If `work` fails, is late or `abandoned` is set, aborts the communicator and raises
        WeightSyncError. gloo normally keeps the deadline; if it does not, the thread is left
        running.
        """
        try:
            return on_thread(work, deadline_s + _GRACE_S, abandoned, name="weight-sender")
        except Unanswered:
            self.abort()
            raise WeightSyncError(f"{what}: not done {reason(deadline_s, abandoned)}") from None
        except RuntimeError as error:
            self.abort()
            raise WeightSyncError(f"{what}: {_SOURCE.sub('', str(error))}") from error


def make_sender(
    transport: str, weights: WeightsSection, device: torch.device, *, largest_bucket: int, host: str
) -> BucketSender:
    """Returns this rank's sender of a transport; raises ConfigError if the trainer has none."""
    match transport:
        case "gloo":
            return GlooSender(weights, host=host)
        case "ipc":
            return IpcSender(weights, device, num_bytes=largest_bucket)
        case "nccl" if device.type == "cuda":
            return NcclSender(weights, device)
        case "nccl":
            raise ConfigError("weights.transport is nccl, but the trainer has no GPU")
    if transport in (added := transports()):
        sender: BucketSender = resolve(added[transport].sender)(weights, device)
        return sender
    raise ConfigError(f"the transport of weights must be gloo, nccl or ipc, got {transport!r}")
