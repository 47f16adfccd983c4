"""What every trajectory queue does.

Consumes: encoded trajectories from rollout servers. Produces: the same for the controller, at least
once each. A sender waits while the queue holds too many unacknowledged bytes; an acknowledgement,
which follows the journal, unblocks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from slipstream.protocol.types import TrajectoryId


@dataclass(frozen=True)
class Delivery:
    """One trajectory as it came out of the queue; it may come again until it is acknowledged."""

    trajectory_id: TrajectoryId
    data: bytes


class AsyncClosing:
    """Ends an `async with` block by `aclose`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Frees what is held."""


class TrajectorySender(Protocol):
    """The rollout server's end."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that were put and not acknowledged yet."""
        ...

    async def put(self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float) -> None:
        """Stores one trajectory; TrajectoryQueueFull when it found no room within `timeout_s`.

        QueueError when it can never fit, or the queue is lost.
        """
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
