"""The trainer's side of a communicator: one sender for each transport of buckets.

The sending ranks are its first ranks, trainer rank 0 is rank 0 and leads; receivers follow. Every
wait has a deadline. After an error the communicator is aborted, and the next publish builds a new
one. `GlooSender` is for machines without a GPU, `NcclSender` sends from GPU to GPU, `IpcSender`
within one host.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from slipstream.learner.trainer.weights.gloo_sender import GlooSender
from slipstream.learner.trainer.weights.ipc_sender import IpcSender
from slipstream.learner.trainer.weights.nccl_sender import open_nccl_sender
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import WeightsSection
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import weights_pb2
from torch import Tensor


class BucketSender(Protocol):
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
        abandoned: threading.Event | None = None,
    ) -> None:
        """Waits for all members; WeightSyncError after the join deadline, or once `abandoned`."""

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


class BucketSenders:
    """The senders of one rank, one for each transport; each is made when it is first used."""

    def __init__(
        self, weights: WeightsSection, device: torch.device, *, largest_bucket: int
    ) -> None:
        """`largest_bucket`: its bytes."""
        self._weights, self._device = weights, device
        self._largest_bucket = largest_bucket
        self._made: dict[str, BucketSender] = {}

    def for_transport(self, transport: str) -> BucketSender:
        """Returns the sender of one transport; ConfigError when that needs a GPU."""
        if transport not in self._made:
            self._made[transport] = self._make(transport)
        return self._made[transport]

    def abort(self) -> None:
        """Leaves every communicator."""
        for sender in self._made.values():
            sender.abort()

    def _make(self, transport: str) -> BucketSender:
        if transport == "gloo":
            return GlooSender(self._weights)
        if transport == "ipc":
            return IpcSender(self._weights, self._device, num_bytes=self._largest_bucket)
        if transport != "nccl":
            raise ConfigError(
                f"the transport of weights must be gloo, nccl or ipc, got {transport!r}"
            )
        if self._device.type != "cuda":
            raise ConfigError("weights.transport is nccl, but the trainer has no GPU")
        return open_nccl_sender(self._weights, self._device)
