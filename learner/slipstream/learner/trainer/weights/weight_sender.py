"""Sends buckets to the rollout servers: the trainer's side of a communicator.

The sending ranks are its first ranks, trainer rank 0 is rank 0 and leads; receivers follow. Every
wait has a deadline. After an error the communicator is aborted, and the next publish builds a new
one. `GlooWeightSender` is for machines without a GPU, `NcclWeightSender` from GPU to GPU,
`IpcWeightSender` within one host.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from slipstream.learner.trainer.weights.ipc_sender import IpcWeightSender
from slipstream.learner.trainer.weights.nccl_sender import open_nccl_sender
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.access.exposure import local_address
from slipstream.protocol.address import listen
from slipstream.protocol.errors import ConfigError, WeightSyncError
from slipstream.protocol.settings.config import WeightsSection
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.giving_up import reason, wait_for
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import weights_pb2
from torch import Tensor
from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

# How long a call may outlast the deadline that was given to gloo itself before its thread is left
# behind.
_GRACE_S = 1.0
# Where gloo's own source says so.
_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class WeightSender(Protocol):
    """One communicator at a time, kept over publishes until its members change or it fails."""

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """On the leader: begins a new communicator and says where its members meet.

        Waits for none of them. ConfigError when nothing can listen on `weights.host`.
        """

    def connect(
        self,
        announced: weights_pb2.Communicator,
        rank: int,
        given_up: threading.Event | None = None,
    ) -> None:
        """Waits for all members; WeightSyncError after the join deadline, or once `given_up`."""

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """Begins the broadcast of a bucket, from its root to all others.

        `data` is not touched before `Release` was called. WeightSyncError when this or one before
        is not done within the deadline of a bucket.
        """

    def finish(self) -> Wire:
        """Waits until all is sent, and says what that took; WeightSyncError after a deadline."""

    @property
    def communicator_id(self) -> str | None:
        """The communicator that is connected; None after an error, and before `connect`."""

    def abort(self) -> None:
        """Breaks the communicator, so that a member that waits in it fails too."""


class WeightSenders:
    """The senders of one rank, one for each transport; each is made when it is first used."""

    def __init__(
        self, weights: WeightsSection, device: torch.device, *, largest_bucket: int
    ) -> None:
        """`largest_bucket`: its bytes."""
        self._weights, self._device = weights, device
        self._largest_bucket = largest_bucket
        self._made: dict[str, WeightSender] = {}

    def of(self, transport: str) -> WeightSender:
        """For the communicators of one transport; ConfigError when it needs a GPU."""
        if transport not in self._made:
            self._made[transport] = self._make(transport)
        return self._made[transport]

    def abort(self) -> None:
        """Leaves every communicator."""
        for sender in self._made.values():
            sender.abort()

    def _make(self, transport: str) -> WeightSender:
        if transport == "gloo":
            return GlooWeightSender(self._weights)
        if transport == "ipc":
            return IpcWeightSender(self._weights, self._device, num_bytes=self._largest_bucket)
        if transport != "nccl":
            raise ConfigError(
                f"the transport of weights must be gloo, nccl or ipc, got {transport!r}"
            )
        if self._device.type != "cuda":
            raise ConfigError("weights.transport is nccl, but the trainer has no GPU")
        return open_nccl_sender(self._weights, self._device)


class GlooWeightSender:
    """Over TCP, from main memory; store and group listen on `weights.host` only.

    One bucket is under way at a time, while the caller fills the next one.
    """

    def __init__(self, weights: WeightsSection) -> None:
        self._weights = weights
        self._id: str | None = None
        # On the leader: where all meet. Without it, who still waits there fails at once.
        self._meeting_place: Store | None = None
        self._group: dist.ProcessGroupGloo | None = None
        self._under_way: tuple[dist.Work, Bucket] | None = None
        self._wire = Wire()

    @property
    def communicator_id(self) -> str | None:
        """See `WeightSender`."""
        return self._id if self._group is not None else None

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """See `WeightSender`."""
        self.abort()
        # The store would listen on all addresses if it opened the socket itself.
        try:
            listener = listen(self._weights.host)
        except OSError as error:
            raise ConfigError(
                f"weights.host must be an address of this machine, "
                f"got {self._weights.host}: {error}"
            ) from error
        port = listener.getsockname()[1]
        self._meeting_place = dist.TCPStore(  # type: ignore[attr-defined]
            self._weights.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._weights.join_deadline_s),
            master_listen_fd=listener.detach(),
        )
        return weights_pb2.Communicator(
            communicator_id=communicator_id,
            transport="gloo",
            store_host=self._weights.host,
            store_port=port,
            world_size=world_size,
            num_senders=num_senders,
        )

    def connect(
        self,
        announced: weights_pb2.Communicator,
        rank: int,
        given_up: threading.Event | None = None,
    ) -> None:
        """See `WeightSender`."""
        if rank != 0:
            self.abort()
        timeout = timedelta(seconds=self._weights.join_deadline_s)

        def join() -> dist.ProcessGroupGloo:
            # The leader, too, as a guest: a thread that is left behind must not keep it open.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                announced.store_host,
                announced.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            )
            # Further senders may run on other machines than the leader.
            host = local_address(announced.store_host, announced.store_port)
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
            given_up=given_up,
        )
        self._id = announced.communicator_id

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """See `WeightSender`."""
        self._settle()
        if self._group is None:
            raise WeightSyncError("there is no communicator to send through")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = bucket.root, 0
        options.timeout = timedelta(seconds=self._weights.bucket_deadline_s)
        work = self._group.broadcast([data], options)  # type: ignore[attr-defined]
        self._under_way = (work, bucket)
        return lambda: self._release(work)

    def finish(self) -> Wire:
        """See `WeightSender`; the seconds are those in which nothing else was left to do."""
        self._settle()
        found, self._wire = self._wire, Wire()
        return found

    def abort(self) -> None:
        """See `WeightSender`."""
        if self._group is not None:
            self._group.abort()
        self._group = self._meeting_place = self._id = self._under_way = None

    def _release(self, work: dist.Work) -> None:
        """Waits for one bucket; it is done when a later one is under way."""
        if self._under_way is not None and self._under_way[0] is work:
            self._settle()

    def _settle(self) -> None:
        """Waits for the bucket that is under way."""
        if self._under_way is None:
            return
        (work, bucket), self._under_way = self._under_way, None
        deadline_s = self._weights.bucket_deadline_s
        what = (
            f"a bucket of {bucket.num_bytes} bytes from rank {bucket.root} "
            f"(weights.bucket_deadline_s = {deadline_s:g})"
        )
        started = time.monotonic()
        self._within(deadline_s, work.wait, what=what)
        seconds = self._wire.seconds + time.monotonic() - started
        self._wire = Wire(seconds, self._wire.num_bytes + bucket.num_bytes)

    def _within(
        self,
        deadline_s: float,
        work: Callable[[], Result],
        *,
        what: str,
        given_up: threading.Event | None = None,
    ) -> Result:
        """Result of `work` on a thread; aborts with WeightSyncError when it fails or is late.

        gloo keeps the deadline itself; the thread is for the case that it does not: it is left
        behind then.
        """
        answers: queue.Queue[Result | RuntimeError] = queue.Queue(maxsize=1)

        def run() -> None:
            try:
                answers.put(work())
            except RuntimeError as error:
                answers.put(error)

        threading.Thread(target=run, name="weight-sender", daemon=True).start()
        try:
            answer = wait_for(answers, deadline_s + _GRACE_S, given_up)
        except queue.Empty:
            self.abort()
            raise WeightSyncError(f"{what}: not done {reason(deadline_s, given_up)}") from None
        if isinstance(answer, RuntimeError):
            self.abort()
            raise WeightSyncError(f"{what}: {_SOURCE.sub('', str(answer))}") from answer
        return answer
