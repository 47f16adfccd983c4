"""A trajectory queue within one process; the reference for the others, and what tests use.

Consumes: `put`. Produces: `get`, each trajectory once for every receiver until it is acknowledged.
Waits for: free bytes. Unblocked by: `acknowledge`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from slipstream.protocol.errors import QueueError
from slipstream.protocol.queue.base import AsyncClosing, Delivery
from slipstream.protocol.queue.budget import ByteBudget
from slipstream.protocol.types import TrajectoryId


class MemoryQueue:
    """Holds what was put and not acknowledged."""

    def __init__(self, max_bytes: int) -> None:
        """Bounded in bytes over all senders."""
        self._budget = ByteBudget(max_bytes)
        self._held: dict[TrajectoryId, bytes] = {}
        self._changed = asyncio.Condition()

    def sender(self) -> MemorySender:
        """One more sender."""
        return MemorySender(self)

    def receiver(self) -> MemoryReceiver:
        """A receiver that is given everything which is not acknowledged, from the beginning."""
        return MemoryReceiver(self)

    @property
    def queued_bytes(self) -> int:
        """Bytes that were put and not acknowledged."""
        return self._budget.used_bytes

    async def put(self, trajectory_id: TrajectoryId, data: bytes, timeout_s: float) -> None:
        """What a sender does."""
        if trajectory_id in self._held:
            return
        await self._budget.acquire(len(data), timeout_s=timeout_s)
        if trajectory_id in self._held:
            # Put twice while both waited.
            self._budget.release(len(data))
            return
        async with self._changed:
            self._held[trajectory_id] = data
            self._changed.notify_all()

    async def next(self, delivered: set[TrajectoryId]) -> Delivery:
        """The first trajectory that is not among `delivered`."""
        async with self._changed:
            while True:
                for trajectory_id, data in self._held.items():
                    if trajectory_id not in delivered:
                        return Delivery(trajectory_id, data)
                await self._changed.wait()

    def forget(self, trajectory_id: TrajectoryId) -> None:
        """Frees the bytes of a trajectory."""
        data = self._held.pop(trajectory_id, None)
        if data is not None:
            self._budget.release(len(data))


class MemorySender(AsyncClosing):
    """A sender of a `MemoryQueue`."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._closed = False

    @property
    def queued_bytes(self) -> int:
        """Bytes in the queue, whoever put them."""
        return self._queue.queued_bytes

    async def put(self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float) -> None:
        """See `TrajectorySender.put`."""
        if self._closed:
            raise QueueError("the sender is closed")
        await self._queue.put(trajectory_id, data, timeout_s)

    async def aclose(self) -> None:
        """See `TrajectorySender.aclose`."""
        self._closed = True


class MemoryReceiver(AsyncClosing):
    """A receiver of a `MemoryQueue`."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._delivered: set[TrajectoryId] = set()

    async def get(self) -> Delivery:
        """See `TrajectoryReceiver.get`."""
        delivery = await self._queue.next(self._delivered)
        self._delivered.add(delivery.trajectory_id)
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """See `TrajectoryReceiver.acknowledge`."""
        for trajectory_id in trajectory_ids:
            self._queue.forget(trajectory_id)
            self._delivered.discard(trajectory_id)

    async def aclose(self) -> None:
        """See `TrajectoryReceiver.aclose`."""
