"""The contract of every trajectory queue.

Consumes: encoded trajectories from rollout servers. Produces: the same trajectories for the
controller, each at least once. A sender waits while the queue holds too many unacknowledged bytes.
An acknowledgement, which the controller sends after it has written its journal, unblocks it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from slipstream.core.types import TrajectoryId


@dataclass(frozen=True)
class Delivery:
    """One trajectory from the queue; it may come again until it is acknowledged."""

    trajectory_id: TrajectoryId
    data: bytes


class AsyncClosing:
    """Makes a class usable in `async with`, which ends with `aclose`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Frees all resources."""


class TrajectorySender(Protocol):
    """The rollout server's end."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that were put and are not yet acknowledged."""

    @property
    def undelivered(self) -> Sequence[TrajectoryId]:
        """Trajectories that this process holds and the receiver may not have; the oldest first."""

    async def put(self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float) -> None:
        """Stores one trajectory.

        Raises TrajectoryQueueFull when there is no room within `timeout_s`.

        Raises QueueError when the trajectory can never fit, or the queue is lost.
        """

    async def aclose(self) -> None:
        """Stops sending; unacknowledged trajectories stay where the queue keeps them."""


class TrajectoryReceiver(Protocol):
    """The controller's end."""

    async def get(self) -> Delivery:
        """Waits for the next trajectory; duplicates are possible and have the same id."""

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Lets the queue and the senders forget these trajectories; ignores unknown ids."""

    async def aclose(self) -> None:
        """Stops receiving."""
