"""Counts the bytes that the queue delivered and that are not acknowledged yet.

Consumes: deliveries of the queue, acknowledgements for it. Produces: both, unchanged, and the
number of waiting bytes. Waits for: the queue. Unblocked by: the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.core.types import TrajectoryId
from slipstream.learner.controller.records.seen_ids import SeenIds
from slipstream.protocol.queue.base import AsyncClosing, Delivery, TrajectoryReceiver


class AccountedReceiver(AsyncClosing):
    """A receiver that knows which of its deliveries are not acknowledged yet."""

    def __init__(self, receiver: TrajectoryReceiver) -> None:
        """Wraps `receiver`, which the caller closes."""
        self._receiver = receiver
        self._waiting: dict[TrajectoryId, int] = {}
        # All ids that were ever acknowledged: the queue itself remembers the newest ones only.
        self._settled = SeenIds()
        self.waiting_bytes = 0

    async def get(self) -> Delivery:
        """Returns the next delivery, like `TrajectoryReceiver.get`; repeated deliveries count once.

        A delivery that was acknowledged before is acknowledged again and not returned: its sender
        has not seen the first answer.
        """
        delivery = await self._receiver.get()
        while delivery.trajectory_id in self._settled:
            await self._receiver.acknowledge((delivery.trajectory_id,))
            delivery = await self._receiver.get()
        self._forget(delivery.trajectory_id)
        self._waiting[delivery.trajectory_id] = len(delivery.data)
        self.waiting_bytes += len(delivery.data)
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """See `TrajectoryReceiver.acknowledge`."""
        settled = tuple(trajectory_ids)
        await self._receiver.acknowledge(settled)
        for trajectory_id in settled:
            self._forget(trajectory_id)
            self._settled.add(trajectory_id)

    def _forget(self, trajectory_id: TrajectoryId) -> None:
        self.waiting_bytes -= self._waiting.pop(trajectory_id, 0)
