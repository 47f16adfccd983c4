"""Which bytes lie in the trajectory queue, as far as they came in here, and what is settled.

Consumes: deliveries of the queue, acknowledgements for it. Produces: both, unchanged, and their
sum. Waits for: the queue. Unblocked by: the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.learner.controller.records.seen_ids import SeenIds
from slipstream.protocol.queue.base import AsyncClosing, Delivery, TrajectoryReceiver
from slipstream.protocol.types import TrajectoryId


class AccountedReceiver(AsyncClosing):
    """A receiver that knows what it delivered and nobody acknowledged yet."""

    def __init__(self, receiver: TrajectoryReceiver) -> None:
        """`receiver` stays the caller's to close."""
        self._receiver = receiver
        self._waiting: dict[TrajectoryId, int] = {}
        # All that was ever acknowledged: the queue itself remembers the newest ones only.
        self._settled = SeenIds()
        self.waiting_bytes = 0

    async def get(self) -> Delivery:
        """See `TrajectoryReceiver.get`; a trajectory that comes again counts once.

        One that is settled is acknowledged again: its sender has not seen the first answer.
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
