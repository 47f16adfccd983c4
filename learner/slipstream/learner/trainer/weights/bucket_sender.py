"""The trainer's side of a communicator, for any transport.

The sending trainer ranks come first in a communicator; trainer rank 0 is its rank 0 and leads. The
receivers' ranks follow. Every wait has a deadline. After an error the communicator is aborted, and
the next publish creates a new one.
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

        The caller must not change `data` until it has called the returned `Release`. Raises
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


def live(joined: Joined | None) -> Joined:
    """Returns `joined`, a sender's connection to its communicator.

    Raises WeightSyncError if it is None.
    """
    if joined is None:
        raise WeightSyncError("there is no communicator to send through")
    return joined
