"""The controller's end of the queue, and the bytes there that are not acknowledged yet.

Consumes: deliveries of the queue, acknowledgements for it. Produces: both, unchanged, and the
number of waiting bytes. Waits for: the queue. Unblocked by: the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack

import grpc.aio
from slipstream.core.types import TrajectoryId
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.seen_ids import SeenIds
from slipstream.learner.controller.run import Run
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.base import AsyncClosing, Delivery, TrajectoryReceiver
from slipstream.protocol.queue.seal import opener
from slipstream.v1 import trajectory_pb2_grpc


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


async def open_receiver(
    stack: AsyncExitStack, server: grpc.aio.Server, journal: Journal, history: RunHistory, run: Run
) -> TrajectoryReceiver:
    """Opens the receiver on `stack`, or adds its service to `server`; journals Redis's data mark.

    Warns when Redis lost the data of an earlier start.
    """
    queue = run.config.queue
    if queue.kind == "redis":
        from slipstream.protocol.queue.redis import RedisReceiver

        url = redis_url_of(queue, "controller")
        receiver = RedisReceiver(url, run.progress.run_id, opener(run.progress.run_key))
        await stack.enter_async_context(receiver)
        if history.queue_mark not in ("", receiver.mark):
            run.events.add(
                "the queue lost what waited there; it is generated again", Severity.WARNING
            )
        journal.append("queue", mark=receiver.mark)
        return receiver
    from slipstream.protocol.queue.grpc import GrpcReceiver

    servicer = GrpcReceiver(opener(run.progress.run_key))
    trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(servicer, server)
    return servicer
