"""The trainer's side of a communicator, whatever its transport.

Sending trainer ranks are the communicator's first ranks; trainer rank 0 is its rank 0 and leads.
The receivers' ranks follow. Every wait has a deadline. After an error the communicator is aborted,
and the next publish builds a new one.
"""

import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import WeightsSection
from slipstream.learner.trainer.weights.weight_stream import Release
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import weights_pb2
from torch import Tensor

Joined = TypeVar("Joined")


class BucketSender(ABC):
    """Sends through one communicator at a time, kept until its members change or it fails.

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
        """The connected communicator; None before `connect` and after an error."""
        return self._id

    def announce(
        self, communicator_id: str, *, num_senders: int, world_size: int
    ) -> weights_pb2.Communicator:
        """Begins a new communicator on the leader and returns where its members meet.

        Does not wait for members. Raises ConfigError if nothing can listen on `weights.host`.
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
        """Waits for all members. Raises WeightSyncError after the deadline or if `abandoned`."""
        self._join(announced, rank, abandoned)
        self._id = announced.communicator_id

    @abstractmethod
    def send(self, bucket: Bucket, data: Tensor) -> Release:
        """Begins the broadcast of a bucket, from its root to all others.

        The caller leaves `data` alone until it has called the `Release`. Raises WeightSyncError
        when this bucket or an earlier one is not sent within `bucket_deadline_s`.
        """

    @abstractmethod
    def finish(self) -> Wire:
        """Waits until all buckets are sent. Raises WeightSyncError after the deadline.

        The result has the seconds on the wire, or the seconds spent waiting if the wire is not
        timed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Breaks the communicator, so that members that wait in it fail too."""

    @abstractmethod
    def _meet(self, communicator_id: str, num_senders: int) -> dict[str, Any]:
        """Opens the rendezvous of the members; returns the fields that announce it."""

    @abstractmethod
    def _join(
        self, announced: weights_pb2.Communicator, rank: int, abandoned: threading.Event | None
    ) -> None:
        """Does the work of `connect`."""


def live(joined: Joined | None) -> Joined:
    """Returns a sender's own part of its communicator; raises WeightSyncError if there is none."""
    if joined is None:
        raise WeightSyncError("there is no communicator to send through")
    return joined
