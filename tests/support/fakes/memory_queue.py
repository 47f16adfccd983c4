"""A trajectory queue within one process: the reference for the queues of the product.

Consumes: `put`. Produces: `get`, each unacknowledged trajectory once for every receiver.
Waits for: free bytes. Unblocked by: `acknowledge`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from slipstream.core.errors import QueueError
from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.base import Amount, AsyncClosing, ByteBudget, Delivery, EpochAmounts


class MemoryQueue:
    def __init__(self, max_bytes: int) -> None:
        """Limits the bytes of all senders together to `max_bytes`."""
        self._budget = ByteBudget(max_bytes)
        self._held: dict[TrajectoryId, bytes] = {}
        self._changed = asyncio.Condition()

    def sender(self) -> MemorySender:
        return MemorySender(self)

    def receiver(self) -> MemoryReceiver:
        """Returns a new receiver, which gets every unacknowledged trajectory from the start."""
        return MemoryReceiver(self)

    @property
    def queued_bytes(self) -> int:
        """Bytes that were put and are not acknowledged."""
        return self._budget.used_bytes

    @property
    def waiting(self) -> tuple[TrajectoryId, ...]:
        return tuple(self._held)

    async def put(self, trajectory_id: TrajectoryId, data: bytes, timeout_s: float) -> None:
        """Stores one trajectory for a sender; see `TrajectorySender.put`."""
        if trajectory_id in self._held:
            return
        await self._budget.acquire(len(data), timeout_s=timeout_s)
        if trajectory_id in self._held:
            # Another call put the same id while both waited.
            self._budget.release(len(data))
            return
        async with self._changed:
            self._held[trajectory_id] = data
            self._changed.notify_all()

    async def next(self, delivered: set[TrajectoryId]) -> Delivery:
        """Waits for and returns the first trajectory that is not in `delivered`."""
        async with self._changed:
            while True:
                for trajectory_id, data in self._held.items():
                    if trajectory_id not in delivered:
                        return Delivery(trajectory_id, data)
                await self._changed.wait()

    def forget(self, trajectory_id: TrajectoryId) -> None:
        data = self._held.pop(trajectory_id, None)
        if data is not None:
            self._budget.release(len(data))


class MemorySender(AsyncClosing):
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._closed, self.taken = False, EpochAmounts()

    @property
    def queued_bytes(self) -> int:
        return self._queue.queued_bytes

    @property
    def undelivered(self) -> Sequence[TrajectoryId]:
        return ()

    async def put(
        self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float, tokens: int = 0
    ) -> None:
        if self._closed:
            raise QueueError("the sender is closed")
        await self._queue.put(trajectory_id, data, timeout_s)
        self.taken.add(trajectory_id, tokens)

    async def aclose(self) -> None:
        self._closed = True


class MemoryReceiver(AsyncClosing):
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._delivered: set[TrajectoryId] = set()
        self.given = Amount()
        self.backlog = queue.waiting

    async def get(self) -> Delivery:
        delivery = await self._queue.next(self._delivered)
        self._delivered.add(delivery.trajectory_id)
        self.given = self.given.plus(delivery.tokens)
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        for trajectory_id in trajectory_ids:
            self._queue.forget(trajectory_id)
            self._delivered.discard(trajectory_id)

    async def aclose(self) -> None:
        """See `TrajectoryReceiver.aclose`."""
