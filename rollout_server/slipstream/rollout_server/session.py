"""One epoch of a server at its controller: its stream, leases, publishes and heartbeats.

Consumes: the controller's orders. Produces: heartbeats and reports on one stream. Waits for:
orders, until the stream ends or the server is asked to stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc.aio
from slipstream.core.machine.gpus import gpu_names
from slipstream.core.settings.config import Config
from slipstream.core.types import GroupId, ServerId
from slipstream.core.waits import asking_in_silence, within
from slipstream.protocol.codec import PROTOCOL_VERSION
from slipstream.protocol.queue.base import Tally, TrajectorySender
from slipstream.protocol.weights.handover import host_id
from slipstream.protocol.weights.nccl_group import agreed_settings
from slipstream.rollout_server.child_processes import is_cpu_build
from slipstream.rollout_server.engine_interface import Engine
from slipstream.rollout_server.episodes.calls import OutgoingMessages
from slipstream.rollout_server.episodes.dispatcher import Dispatcher
from slipstream.rollout_server.episodes.play import EpisodeLease, EpisodeServices, Identity
from slipstream.rollout_server.part import Fetches
from slipstream.rollout_server.usage import EpochCounters
from slipstream.rollout_server.weight_orders import WeightOrders
from slipstream.v1 import fleet_pb2, weights_pb2

# Opens what fetches versions for one session, which reports on publishes by the function and has
# its tasks in the group; returns None if the trainer sends the weights.
OpenFetches: TypeAlias = Callable[
    [Callable[[fleet_pb2.PublishReport], None], asyncio.TaskGroup], Fetches | None
]

log = logging.getLogger(__name__)

_FLUSH_PERIOD_S = 0.02
# Time limits for cancelled episodes to end, for the queue to send its trajectories, and for the
# controller to end the stream.
CANCEL_S = 5.0
FLUSH_S = 5.0
GOODBYE_S = 2.0

JoinCall = grpc.aio.StreamStreamCall[fleet_pb2.ServerMessage, fleet_pb2.ControllerMessage]


class Session:
    """Serves one epoch, from the welcome to the end of the stream.

    After `stop` or a drain order, running episodes have `rollout_server.drain_timeout_s` to end. If
    the stream ends first, the epoch is lost, and they have the controller's `heartbeat_timeout_s`.
    """

    def __init__(
        self,
        identity: Identity,
        welcome: fleet_pb2.Welcome,
        outbox: OutgoingMessages[fleet_pb2.ServerMessage],
        config: Config,
        sender: TrajectorySender,
        services: EpisodeServices,
        group: asyncio.TaskGroup,
        open_fetches: OpenFetches,
        ask: Callable[[], Awaitable[None]],
    ) -> None:
        """Runs its tasks in `group`; the engine must be paused and have no open request.

        `ask` raises AioRpcError if the controller does not know the epoch.
        """
        self._ask = ask
        self._welcome = welcome
        self._outbox = outbox
        self._config = config
        self._sender = sender
        self._environments = services.environments
        self._refused_agents = services.refused_agents
        self._engine = services.model.engine
        self._counters = EpochCounters(self._engine.requests.use())
        self._epoch = f"{identity.server_epoch:x}"
        self.dispatcher = Dispatcher(
            group,
            identity,
            services,
            self._counters,
            sender,
            max_episodes=config.rollout_server.max_episodes,
            closed=lambda report: outbox.put_nowait(fleet_pb2.ServerMessage(lease=report)),
        )
        self._orders = WeightOrders(
            self._engine,
            self.dispatcher,
            self._publish_report,
            rested=lambda answer: outbox.put_nowait(fleet_pb2.ServerMessage(rested=answer)),
        )
        self._fetches = open_fetches(self._tell_publish, group)
        self._group = group
        self._drain_ordered = asyncio.Event()
        # Set by a drain order that leaves running episodes no time.
        self._leave_at_once = asyncio.Event()
        self._reason = "it was told to stop"
        # Whether the server leaves a run that was stopped, and that may go on later.
        self.run_stopped = False

    async def serve(self, call: JoinCall, stop: asyncio.Event) -> bool:
        """Serves until the stream ends, `stop` is set or a drain order comes.

        Returns whether the epoch was lost, after running episodes have ended or were cancelled.
        """
        publishing = self._group.create_task(self._orders.run())
        heart = self._group.create_task(self._beat())
        reader = self._group.create_task(self._read(call))
        await _any_of(reader, stop, self._drain_ordered)
        if not reader.done():
            draining = fleet_pb2.Draining(reason=self._reason)
            self._outbox.put_nowait(fleet_pb2.ServerMessage(draining=draining))
            self.dispatcher.drain()
            limit_s = self._config.rollout_server.drain_timeout_s
            await within(limit_s, _any_of(reader, self.dispatcher.idle, self._leave_at_once))
        if reader.done():
            log.warning("lost the controller; running episodes may end within its heartbeat limit")
            await within(self._welcome.heartbeat_timeout_s, self.dispatcher.idle.wait())
            await self._end_episodes(publishing, carry_out=False)
            heart.cancel()
            return True
        await self._end_episodes(publishing, carry_out=True)
        await within(FLUSH_S, self._flush())
        heart.cancel()
        self._outbox.put_nowait(fleet_pb2.ServerMessage(drained=self._report(is_last=True)))
        self._outbox.put_nowait(None)
        await within(GOODBYE_S, asyncio.shield(reader))
        reader.cancel()
        return False

    async def _read(self, call: JoinCall) -> None:
        """Reads and executes orders until the stream ends, with or without an error."""
        try:
            async for message in asking_in_silence(call.read, self._ask):
                if not isinstance(message, fleet_pb2.ControllerMessage):
                    return
                await self._take(message)
        except grpc.aio.AioRpcError as error:
            log.warning("the controller's stream broke: %s", error.details() or error.code().name)

    async def _take(self, message: fleet_pb2.ControllerMessage) -> None:
        match message.WhichOneof("message"):
            case "lease":
                self.dispatcher.start(EpisodeLease.from_pb(message.lease, self._config.sampling))
            case "cancel":
                log.info("lease %s: %s", message.cancel.group_id, message.cancel.reason)
                await self.dispatcher.cancel(GroupId(message.cancel.group_id))
            case "environment":
                self._environments.order(message.environment)
            case "drain":
                log.info("draining: %s", message.drain.reason)
                self._reason = message.drain.reason
                self.run_stopped = message.drain.run_stopped
                if not message.drain.finish:
                    self._leave_at_once.set()
                self._drain_ordered.set()
            case "prepare" if self._fetches is not None:
                self._fetches.start(message.prepare)
            case "prepare" | "receive" | "commit" | "abort" | "probe_verdict" | "rest" | "wake":
                if self._fetches is not None:
                    message = self._fetches.completed(message)
                self._orders.put(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._welcome.heartbeat_s)
            self._outbox.put_nowait(fleet_pb2.ServerMessage(heartbeat=self._report()))

    async def _end_episodes(self, publishing: asyncio.Task[None], *, carry_out: bool) -> None:
        if self._fetches is not None:
            self._fetches.close()
        self._orders.close(carry_out=carry_out)
        await asyncio.wait((publishing,))
        await self.dispatcher.cancel_all()
        await within(CANCEL_S, self.dispatcher.idle.wait())

    async def _flush(self) -> None:
        while self._sender.queued_bytes:
            await asyncio.sleep(_FLUSH_PERIOD_S)

    def _report(self, *, is_last: bool = False) -> fleet_pb2.ServerReport:
        return self._counters.report(
            self._engine.requests.use(),
            sent=self._sender.taken.get(self._epoch, Tally()),
            queued_bytes=self._sender.queued_bytes,
            refused_agents=self._refused_agents(),
            is_last=is_last,
        )

    def _publish_report(self, report: fleet_pb2.PublishReport) -> None:
        if self._fetches is not None:
            self._fetches.note(report)
        self._tell_publish(report)

    def _tell_publish(self, report: fleet_pb2.PublishReport) -> None:
        self._outbox.put_nowait(fleet_pb2.ServerMessage(publish=report))


def hello(
    server_id: ServerId, epoch: int, config: Config, engine: Engine, *, process: int
) -> fleet_pb2.ServerHello:
    """Returns the first message of a server on its stream.

    `process` is a number that identifies this server process in all of its epochs.
    """
    return fleet_pb2.ServerHello(
        server_id=server_id,
        server_epoch=epoch,
        protocol_version=PROTOCOL_VERSION,
        max_episodes=config.rollout_server.max_episodes,
        engine_workers=engine.num_workers,
        max_model_len=engine.max_model_len,
        host=socket.gethostname(),
        queue_bytes=config.queue.max_bytes,
        place=weights_pb2.Place(
            host_id=host_id(),
            gpus=[] if is_cpu_build() else gpu_names(os.environ, 0, engine.num_workers),
            nccl=agreed_settings(os.environ),
        ),
        from_storage=config.weights.storage_url is not None,
        process=process,
        engine_settings=config.engine_settings,
        disabled_features=dict(engine.disabled_features),
    )


async def _any_of(reader: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Waits until `reader` has ended or one of `events` is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait((reader, *waits), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
