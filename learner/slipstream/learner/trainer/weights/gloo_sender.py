"""Sends buckets over TCP from main memory: the trainer's side of a gloo communicator."""

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.bucket_sender import BucketSender, live
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.access.exposure import local_address
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.handover import listen_for_members
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.protocol.weights.waits import Unanswered, on_thread, reason
from slipstream.v1 import weights_pb2
from torch import Tensor
from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

# Seconds by which a call may outlast gloo's own deadline before its thread is left behind.
_GRACE_S = 1.0

# Messages of gloo begin with a file and line of its source, which users need not see.
_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class GlooSender(BucketSender):
    """Sends over TCP, for machines without a GPU; listens only on `host`.

    One bucket is sent at a time, while the caller fills the next one.
    """

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
        # The store would listen on all addresses if it opened the socket itself.
        listener = listen_for_members(self._host)
        port = listener.getsockname()[1]
        self._meeting_place = dist.TCPStore(  # type: ignore[attr-defined]
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._weights.join_deadline_s),
            master_listen_fd=listener.detach(),
        )
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

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        self._settle()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = bucket.root, 0
        options.timeout = timedelta(seconds=self.bucket_deadline_s)
        work = live(self._group).broadcast([data], options)  # type: ignore[attr-defined]
        self._under_way = (work, bucket)
        return lambda: self._release(work)

    def finish(self) -> Wire:
        self._settle()
        found, self._wire = self._wire, Wire()
        return found

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._meeting_place = self._id = self._under_way = None

    def _release(self, work: dist.Work) -> None:
        """Waits for the send of one bucket; once a later bucket is being sent, this one is done."""
        if self._under_way is not None and self._under_way[0] is work:
            self._settle()

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
