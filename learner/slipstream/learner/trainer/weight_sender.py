"""Sends weights to the rollout servers: the senders' side of the communicator.

Rank 0 sends; receivers follow as ranks 1, 2, ... Every wait has a deadline. After an error the
communicator is aborted, and the next publish builds a new one.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist
from slipstream.protocol.config import WeightsSection
from slipstream.protocol.errors import ConfigError, WeightSyncError
from slipstream.v1 import weights_pb2
from torch import Tensor
from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How long a call may outlast the deadline that was given to gloo itself before its thread is left
# behind.
_GRACE_S = 1.0


class WeightSender(Protocol):
    """One communicator at a time, kept over publishes until its members change or it fails."""

    def listen(self, communicator_id: str, world_size: int) -> weights_pb2.Communicator:
        """Begins a new communicator and says where its members meet; waits for none of them.

        ConfigError when nothing can listen on `weights.host`.
        """

    def connect(self) -> None:
        """Waits for all members; WeightSyncError after the join deadline."""

    def send(self, buckets: Iterable[Tensor]) -> None:
        """Sends each bucket to all; WeightSyncError after a deadline."""

    @property
    def communicator_id(self) -> str | None:
        """The communicator that is connected; None after an error, and before `connect`."""

    def abort(self) -> None:
        """Breaks the communicator, so that a member that waits in it fails too."""


class GlooWeightSender:
    """Over TCP, for machines without a GPU; store and group listen on `weights.host` only."""

    def __init__(self, weights: WeightsSection) -> None:
        self._weights = weights
        self._announced: weights_pb2.Communicator | None = None
        self._store: Store | None = None
        self._group: dist.ProcessGroupGloo | None = None

    @property
    def communicator_id(self) -> str | None:
        """See `WeightSender`."""
        if self._group is None or self._announced is None:
            return None
        return self._announced.communicator_id

    def listen(self, communicator_id: str, world_size: int) -> weights_pb2.Communicator:
        """See `WeightSender`."""
        self.abort()
        # The store would listen on all addresses if it opened the socket itself.
        try:
            listener = socket.create_server((self._weights.host, 0))
        except OSError as error:
            raise ConfigError(
                f"weights.host must be an address of this machine, "
                f"got {self._weights.host}: {error}"
            ) from error
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._weights.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._weights.join_deadline_s),
            master_listen_fd=listener.detach(),
        )
        self._announced = weights_pb2.Communicator(
            communicator_id=communicator_id,
            transport="gloo",
            store_host=self._weights.host,
            store_port=port,
            world_size=world_size,
            num_senders=1,
        )
        return self._announced

    def connect(self) -> None:
        """See `WeightSender`."""
        announced, store = self._announced, self._store
        assert announced is not None
        assert store is not None

        def join() -> dist.ProcessGroupGloo:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._weights.host)]
            options._threads = 1
            options._timeout = timedelta(seconds=self._weights.join_deadline_s)
            meeting = dist.PrefixStore(  # type: ignore[attr-defined]
                announced.communicator_id, store
            )
            return dist.ProcessGroupGloo(meeting, 0, announced.world_size, options)

        self._group = self._within(
            self._weights.join_deadline_s,
            join,
            what=f"{announced.world_size - 1} workers joining {announced.communicator_id}",
        )

    def send(self, buckets: Iterable[Tensor]) -> None:
        """See `WeightSender`."""
        group = self._group
        if group is None:
            raise WeightSyncError("there is no communicator to send through")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._weights.bucket_deadline_s)
        for place, bucket in enumerate(buckets):

            def broadcast(bucket: Tensor = bucket) -> None:
                group.broadcast([bucket], options).wait()  # type: ignore[attr-defined]

            what = f"bucket {place} of {bucket.numel()} bytes"
            self._within(self._weights.bucket_deadline_s, broadcast, what=what)

    def abort(self) -> None:
        """See `WeightSender`."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = self._announced = None

    def _within(self, deadline_s: float, work: Callable[[], Result], *, what: str) -> Result:
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
            answer = answers.get(timeout=deadline_s + _GRACE_S)
        except queue.Empty:
            self.abort()
            raise WeightSyncError(f"{what}: not done after {deadline_s} s") from None
        if isinstance(answer, RuntimeError):
            self.abort()
            raise WeightSyncError(f"{what}: {answer}") from answer
        return answer
