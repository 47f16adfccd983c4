"""What every trajectory queue does.

Consumes: encoded trajectories from rollout servers. Produces: the same for the controller, at least once each.
A sender waits while the queue holds too many unacknowledged bytes; an acknowledgement, which follows the journal, unblocks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from slipstream.protocol.types import TrajectoryId


@dataclass(frozen=True)
class Delivery:
    """One trajectory as it came out of the queue; it may come again until it is acknowledged."""

    trajectory_id: TrajectoryId
    data: bytes


class TrajectorySender(Protocol):
    """The rollout server's end."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that were put and not acknowledged yet."""
        ...

    async def put(self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float) -> None:
        """Stores one trajectory; TrajectoryQueueFull when no bytes became free within `timeout_s`."""
        ...

    async def aclose(self) -> None:
        """Stops sending. What was not acknowledged stays where the queue keeps it."""
        ...


class TrajectoryReceiver(Protocol):
    """The controller's end."""

    async def get(self) -> Delivery:
        """Waits for the next trajectory; duplicates are possible and carry the same id."""
        ...

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Lets the queue and the senders forget these; unknown ids are ignored."""
        ...

    async def aclose(self) -> None:
        """Stops receiving."""
        ...
