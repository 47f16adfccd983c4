"""Sends buckets over TCP from main memory: the trainer's side of a gloo communicator."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.machine.address import listen
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.access.exposure import local_address
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.protocol.weights.waits import reason, wait_for
from slipstream.v1 import weights_pb2
from torch import Tensor
from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

# Seconds by which a call may outlast gloo's own deadline before its thread is left behind.
_GRACE_S = 1.0

# Messages of gloo begin with a file and line of its source, which users need not see.
_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class GlooSender:
    """Sends over TCP; store and group listen on `weights.host` only.

    One bucket travels at a time, while the caller fills the next one.
    """

    def __init__(self, weights: WeightsSection) -> None:
        self._weights = weights
        self.bucket_deadline_s = weights.bucket_deadline_s
        self._id: str | None = None
        # The store on the leader where all members meet. Closing it ends the waits of members
        # there.
        self._meeting_place: Store | None = None
        self._group: dist.ProcessGroupGloo | None = None
        self._under_way: tuple[dist.Work, Bucket] | None = None
        self._wire = Wire()

    @property
    def communicator_id(self) -> str | None:
        """See `BucketSender`."""
        return self._id if self._group is not None else None

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """See `BucketSender`."""
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
        abandoned: threading.Event | None = None,
    ) -> None:
        """See `BucketSender`."""
        if rank != 0:
            self.abort()
        timeout = timedelta(seconds=self._weights.join_deadline_s)

        def join() -> dist.ProcessGroupGloo:
            # The leader connects as a client too: a thread that is left behind must not keep the
            # leader's own store open.
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
            abandoned=abandoned,
        )
        self._id = announced.communicator_id

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """See `BucketSender`."""
        self._settle()
        if self._group is None:
            raise WeightSyncError("there is no communicator to send through")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = bucket.root, 0
        options.timeout = timedelta(seconds=self.bucket_deadline_s)
        work = self._group.broadcast([data], options)  # type: ignore[attr-defined]
        self._under_way = (work, bucket)
        return lambda: self._release(work)

    def finish(self) -> Wire:
        """See `BucketSender`; the seconds are the time spent waiting for buckets."""
        self._settle()
        found, self._wire = self._wire, Wire()
        return found

    def abort(self) -> None:
        """See `BucketSender`."""
        if self._group is not None:
            self._group.abort()
        self._group = self._meeting_place = self._id = self._under_way = None

    def _release(self, work: dist.Work) -> None:
        """Waits for one bucket; a bucket is already sent once a later one is on its way."""
        if self._under_way is not None and self._under_way[0] is work:
            self._settle()

    def _settle(self) -> None:
        """Waits for the bucket that is on its way, if any."""
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
        """Runs `work` on a thread and returns its result; aborts when it fails or is late.

        Raises WeightSyncError then. gloo normally keeps the deadline itself; when it does not, the
        thread is left behind.
        """
        answers: queue.Queue[Result | RuntimeError] = queue.Queue(maxsize=1)

        def run() -> None:
            try:
                answers.put(work())
            except RuntimeError as error:
                answers.put(error)

        threading.Thread(target=run, name="weight-sender", daemon=True).start()
        try:
            answer = wait_for(answers, deadline_s + _GRACE_S, abandoned)
        except queue.Empty:
            self.abort()
            raise WeightSyncError(f"{what}: not done {reason(deadline_s, abandoned)}") from None
        if isinstance(answer, RuntimeError):
            self.abort()
            raise WeightSyncError(f"{what}: {_SOURCE.sub('', str(answer))}") from answer
        return answer
