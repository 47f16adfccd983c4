"""The trainer's side of a communicator: one sender for each transport of buckets.

Sending trainer ranks are the communicator's first ranks; trainer rank 0 is its rank 0 and leads.
The receivers' ranks follow. Every wait has a deadline. After an error the communicator is aborted,
and the next publish builds a new one. `GlooSender` is for machines without a GPU, `NcclSender`
sends from GPU to GPU, `IpcSender` within one host.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.gloo_sender import GlooSender
from slipstream.learner.trainer.weights.ipc_sender import IpcSender
from slipstream.learner.trainer.weights.nccl_sender import open_nccl_sender
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import weights_pb2
from torch import Tensor


class BucketSender(Protocol):
    """Sends through one communicator at a time, kept until its members change or it fails.

    On the leader `announce`, then on every sending rank `connect`; for each publish `send` every
    bucket, then `finish`. `abort` ends the communicator at any time.
    """

    # Seconds that one bucket may take; each publish sets its own.
    bucket_deadline_s: float

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """Begins a new communicator on the leader and returns where its members meet.

        Does not wait for members. Raises ConfigError if nothing can listen on `weights.host`.
        """

    def connect(
        self,
        announced: weights_pb2.Communicator,
        rank: int,
        abandoned: threading.Event | None = None,
    ) -> None:
        """Waits for all members. Raises WeightSyncError after the deadline or if `abandoned`."""

    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """Begins the broadcast of a bucket, from its root to all others.

        The caller leaves `data` alone until it has called the `Release`. Raises WeightSyncError
        when this bucket or an earlier one is not sent within `bucket_deadline_s`.
        """

    def finish(self) -> Wire:
        """Waits until all buckets are sent. Raises WeightSyncError after the deadline."""

    @property
    def communicator_id(self) -> str | None:
        """The connected communicator; None before `connect` and after an error."""

    def abort(self) -> None:
        """Breaks the communicator, so that members that wait in it fail too."""


class BucketSenders:
    """The senders of one rank, one for each transport; each is made when it is first used."""

    def __init__(
        self, weights: WeightsSection, device: torch.device, *, largest_bucket: int
    ) -> None:
        """Takes the size of the `largest_bucket` in bytes."""
        self._weights, self._device = weights, device
        self._largest_bucket = largest_bucket
        self._made: dict[str, BucketSender] = {}

    def for_transport(self, transport: str) -> BucketSender:
        """Returns the sender of a transport. Raises ConfigError if it needs a GPU."""
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
