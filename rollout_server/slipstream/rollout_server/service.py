"""The whole server: engine, environments, queue, and one session after another.

Consumes: the address of the controller. Produces: a running server, until it is asked to stop.
Waits for: the controller to answer. Unblocked by: the controller's welcome, or
`controller.stall_timeout_s`.

The tasks of a server share one event loop; all end with the task group of `RolloutServer.run`:

    controller --stream--> Session._read --orders--> WeightOrders.run --> engine --> its workers
        ^                       |                         | hold, settle
        |                       '--leases--> Dispatcher: a task a lease, a task a member
        |                                         |            ^
        '-- beats, reports                        |            '--> environment | engine (Play)
        '-- queue's sender <----trajectories------'

    task                        waits for                       the wait is ended by
    Session._read               the next order                  the stream's end: the epoch is lost
    Session._beat               heartbeat_s                     the epoch's end
    WeightOrders.run            the next order                  the controller; close; for a
                                                                verdict also VERDICT_LIMIT_S
      prepare_weights           the publish's other members     they join; an abort; join_deadline_s
      receive_weights           buckets                         bytes; the deadline of each bucket
    a member of a lease         a place                         another episode's end
      Play.ask                  the environment, the agent      its answer; timeout_s; cancel
      Play.generate             the engine's outputs            the last one; cancel; EngineDied
      Dispatcher._deliver       the verdict, room in the queue  settle; acknowledgements; abandon
    Environments: a worker      its process                     ready; its limits; it starts again
    FetchOrders                 storage                         it comes; a newer order; a deadline
    engine.watch                the engine's end or silence     never ends well: EngineDied

Threads: `weight-staging` and `weight-join` in the engine's workers wait for buckets and members;
the loop waits for neither of them.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import grpc
import grpc.aio
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.patience import Patience
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.access.security import call_metadata, cause_of, open_channel
from slipstream.protocol.queue.base import TrajectorySender
from slipstream.protocol.rich_errors import REFUSALS, Reason, broken_stream, has_reason
from slipstream.rollout_server.episodes.calls import OutgoingMessages
from slipstream.rollout_server.episodes.environments import ClientEnvironments, Environments
from slipstream.rollout_server.episodes.play import EpisodeServices, Identity, ServedModel
from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
from slipstream.rollout_server.part import Fetches
from slipstream.rollout_server.parts import open_sender, server_parts
from slipstream.rollout_server.session import JoinCall, Session, hello
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc, status_pb2, status_pb2_grpc

log = logging.getLogger(__name__)

_RETRY_S = 0.2
# Most trajectory ids in a ServerHello; trajectories beyond this number may be sampled again.
MAX_UNDELIVERED = 16384
_WELCOME_LIMIT_S = 20.0
# Seconds that a controller has to say whether it knows a silent stream.
_ASK_LIMIT_S = 60.0


class _Joined(NamedTuple):
    call: JoinCall
    epoch: int
    welcome: fleet_pb2.Welcome


class RolloutServer:
    """Joins the controller, and rejoins it in a new epoch after every lost stream."""

    def __init__(
        self,
        config: Config,
        address: str,
        server_id: ServerId,
        model: ServedModel,
        gateway: WorkerGateway,
    ) -> None:
        """Loads the credentials, and opens the storage of weights if the server reads from it.

        Raises ConfigError if either fails.
        """
        self._config = config
        self._address = address
        self._server_id, self._process = server_id, secrets.randbits(63)
        self._model = model
        self._gateway = gateway
        self._credentials = run_credentials(config, address)
        self._metadata = call_metadata(self._credentials, config.run.id)
        self._outbox = OutgoingMessages[fleet_pb2.ServerMessage]()
        self._parts = server_parts(config, server_id)

    async def run(self, stop: asyncio.Event) -> bool:
        """Serves until `stop` is set or the controller orders it to leave, then drains.

        Returns whether it has left a run that was stopped or has failed, and that may go on later.
        Raises ConfigError if the address needs other credentials or the controller refuses the
        server, and RunFailed if no controller of this run welcomes the server within
        `controller.stall_timeout_s`. After the first welcome, errors come in an exception group.
        """
        async with AsyncExitStack() as stack:
            for part in self._parts:
                await stack.enter_async_context(part.beside(self._model.engine))
                stack.push_async_callback(part.aclose)
                self._gateway.variables.update(part.worker_variables())
            channel = open_channel(self._address, self._credentials)
            stack.push_async_callback(channel.close, None)
            following = await self._join(channel, stop)
            if following is None:
                return False
            config = self._config
            run_id = following.welcome.run_id
            sender = await open_sender(stack, config, channel, self._metadata, run_id)
            await stack.enter_async_context(self._gateway)
            async with asyncio.TaskGroup() as group:
                environments = Environments(
                    group,
                    self._gateway,
                    ClientEnvironments(channel, self._metadata),
                    lambda report: self._outbox.put_nowait(
                        fleet_pb2.ServerMessage(environment=report)
                    ),
                )
                services = self._episode_services(environments, channel)
                watches = [
                    group.create_task(self._model.engine.watch()),
                    group.create_task(self._gateway.logs.watch()),
                ]
                # Sessions whose last trajectories wait for room in the queue: a controller may make
                # room.
                waiting: list[Session] = []
                run_stopped = False
                while following is not None:
                    call, epoch, welcome = following
                    identity = Identity(run_id, self._server_id, epoch, welcome.delivery_key)
                    session = Session(
                        identity,
                        welcome,
                        self._outbox,
                        config,
                        sender,
                        services,
                        group,
                        self._fetches,
                        partial(self._ask, channel, epoch),
                    )
                    try:
                        is_lost = await session.serve(call, stop)
                    finally:
                        call.cancel()
                    run_stopped = session.run_stopped and not stop.is_set()
                    waiting = [
                        open_session
                        for open_session in (*waiting, session)
                        if not open_session.dispatcher.idle.is_set()
                    ]
                    following = await self._join(channel, stop, sender) if is_lost else None
                for session in waiting:
                    session.dispatcher.abandon()
                for watch in watches:
                    watch.cancel()
                environments.close()
        log.info("drained")
        return run_stopped

    def _fetches(
        self,
        report: Callable[[fleet_pb2.PublishReport], None],
        group: asyncio.TaskGroup,
    ) -> Fetches | None:
        """Returns what fetches versions for one session; None if the trainer sends them."""
        fetches = [part.fetches(report, group) for part in self._parts]
        return next(filter(None, fetches), None)

    async def _ask(self, channel: grpc.aio.Channel, epoch: int) -> None:
        """Raises AioRpcError unless a controller answers that has a stream of `epoch`."""
        status = await status_pb2_grpc.StatusServiceStub(channel).GetStatus(
            status_pb2.GetStatusRequest(), metadata=self._metadata, timeout=_ASK_LIMIT_S
        )
        gone = (fleet_pb2.SERVER_STATE_DEAD, fleet_pb2.SERVER_STATE_LEFT)
        if epoch not in {
            server.server_epoch for server in status.servers if server.state not in gone
        }:
            raise broken_stream("the controller has no such stream")

    def _episode_services(
        self, environments: Environments, channel: grpc.aio.Channel
    ) -> EpisodeServices:
        """Returns what episodes use, with what the server's parts add to it."""
        references = [part.references() for part in self._parts]
        records = [part.call_records(channel, self._metadata) for part in self._parts]
        return EpisodeServices(
            self._model,
            environments,
            next(filter(None, references), None),
            next(filter(None, records), None),
            refused_agents=lambda: sum(part.refused_agents() for part in self._parts),
        )

    def _greeting(self, epoch: int, sender: TrajectorySender | None) -> fleet_pb2.ServerHello:
        """Returns the hello of an epoch, with the trajectories that `sender` holds at present."""
        engine = self._model.engine
        greeting = hello(self._server_id, epoch, self._config, engine, process=self._process)
        if sender is not None:
            greeting.undelivered.extend(sender.undelivered[:MAX_UNDELIVERED])
        return greeting

    async def _join(
        self,
        channel: grpc.aio.Channel,
        stop: asyncio.Event,
        sender: TrajectorySender | None = None,
    ) -> _Joined | None:
        """Returns a stream that the controller welcomed, in a new epoch, or None if `stop` is set.

        `sender` has the trajectories that the controller may lack. Raises RunFailed if no welcome
        comes within `controller.stall_timeout_s`, and ConfigError if the controller refuses the
        server.
        """
        patience = Patience(self._config.controller.stall_timeout_s)
        cause = logged_cause = ""
        while not stop.is_set():
            if patience.is_over:
                raise RunFailed(f"no welcome from the controller at {self._address}: {cause}")
            patience.begin(_WELCOME_LIMIT_S + _RETRY_S)
            epoch = secrets.randbits(63)
            self._outbox.end()
            self._outbox = OutgoingMessages()
            call: JoinCall | None = None
            try:
                async with asyncio.timeout(_WELCOME_LIMIT_S):
                    for part in self._parts:
                        await part.before_join()
                    self._outbox.put_nowait(
                        fleet_pb2.ServerMessage(hello=self._greeting(epoch, sender))
                    )
                    call = fleet_pb2_grpc.FleetServiceStub(channel).Join(
                        self._outbox.messages(), metadata=self._metadata
                    )
                    message = await call.read()
                if isinstance(message, fleet_pb2.ControllerMessage) and message.HasField("welcome"):
                    log.info("joined run %s at %s", message.welcome.run_id, self._address)
                    return _Joined(call, epoch, message.welcome)
                cause = "it sent no welcome"
            except grpc.aio.AioRpcError as error:
                cause = cause_of(error.code(), error.details())
                if error.code() in REFUSALS:
                    kind = RunFailed if has_reason(error, Reason.OTHER_RUN) else ConfigError
                    raise kind(f"{self._address} refuses this server: {cause}") from None
            except TimeoutError:
                cause = f"no answer within {_WELCOME_LIMIT_S:g} s"
            if cause != logged_cause:
                log.warning("no welcome from the controller at %s yet: %s", self._address, cause)
                logged_cause = cause
            if call is not None:
                call.cancel()
            await asyncio.sleep(_RETRY_S)
        return None
