"""The controller's end of the queue that the settings name."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc.aio
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.run import Run
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.base import TrajectoryReceiver
from slipstream.protocol.queue.seal import opener
from slipstream.v1 import trajectory_pb2_grpc


async def open_receiver(
    stack: AsyncExitStack,
    server: grpc.aio.Server,
    journal: Journal,
    history: RunHistory,
    run: Run,
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
