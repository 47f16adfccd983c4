"""The service for rollout servers, and that for questions about the run.

It serves each server's stream from its hello to its end. Consumes: the server's messages. Produces:
orders to the server. Waits for: its hello. Unblocked by: the hello, or the limit of that wait.
"""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

import grpc
import grpc.aio
from slipstream.core.errors import ConfigError, ProtocolError, check_server_id
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.run_folder import JOURNAL, JOURNAL_LOG
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.types import ServerId, TrajectoryId
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.publishing.receivers import misfit
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import (
    CallContext,
    JoinedOrder,
    ServerKey,
    ServerSession,
    describe,
)
from slipstream.learner.controller.tasks import Relay, first_message
from slipstream.protocol.queue.base import server_key
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.protocol.setup import describe_setup
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc, status_pb2_grpc
from slipstream.v1 import status_pb2 as pb

# Largest number of engine workers of one server; no machine has as many GPUs.
MAX_ENGINE_WORKERS = 1024
# Largest plausible speed of an engine; a server that reports more is refused.
MAX_TOKENS_PER_S = 1e7
_COUNTERS = (
    "generated_tokens",
    "ended_tokens",
    "in_flight_tokens",
    "drafted_tokens",
    "accepted_tokens",
)
# Seconds that a server may count from the time before the controller has read its hello.
BEFORE_S = 60.0


def _differing(server_settings: str, own: str) -> str:
    """Returns the first setting in which a server differs from the controller; "" if none does."""
    expected = json.loads(own)
    del expected["algorithm"]
    try:
        stated = json.loads(server_settings or own)
        stated.pop("algorithm", None)
        names = [*expected, *stated]
        different = [name for name in names if stated.get(name) != expected.get(name)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"settings that cannot be read: {server_settings[:100]}"
    if not different:
        return ""
    name = different[0]
    return f"{name[:100]} = {str(stated.get(name))[:100]}, the controller has {expected.get(name)}"


def without_effect(settings: str, algorithm: AlgorithmSection) -> str:
    """Returns what a server's file says of the algorithm in vain, or "" if the run does the same.

    `settings` are those of the server, which `_differing` has read.
    """
    table = json.loads(settings).get("algorithm") if settings else None
    stated = table if isinstance(table, dict) else {}
    values = algorithm.model_dump(mode="json")
    names = sorted(stated.keys() & values.keys())
    vain_names = [name for name in names if stated[name] != values[name]]
    parts = [
        f"{name} = {str(stated[name])[:100]} (the run has {values[name]})" for name in vain_names
    ]
    return ", ".join(parts)


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """Serves rollout servers: their streams, and their calls to environments of clients."""

    def __init__(
        self,
        fleet: Fleet,
        run: ControlledRun,
        relay: Relay,
        waiting: Callable[[], Awaitable[Sequence[TrajectoryId]]],
    ) -> None:
        """Takes `waiting`, which returns the trajectories that lie in the queue."""
        self._fleet = fleet
        self._waiting = waiting
        self._relay = relay
        self._run = run
        self._progress = run.progress
        # Warnings about files of servers, which may join again and again.
        self._told: set[str] = set()

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[fleet_pb2.ServerMessage], context: CallContext
    ) -> AsyncIterator[fleet_pb2.ControllerMessage | bytes]:
        """Serves one server to the end of its stream; yields orders, a `JoinedOrder` encoded."""
        # A server names what is not in the queue. What it has put there may not be read yet, and
        # the hello comes later.
        in_queue = await self._waiting()
        session = await self._greet(request_iterator, context)
        session.in_queue = in_queue
        hello = session.hello
        algorithm = self._run.config.algorithm
        stated = without_effect(hello.engine_settings, algorithm)
        if stated:
            name = hello.server_id[:100]
            text = f"server {name}: its file's algorithm has no effect: {stated}"
            if text not in self._told:
                self._told.add(text)
                self._run.events.warn(text)
        settings = self._run.config.controller
        # Before the welcome is sent: another server cannot be given this epoch meanwhile.
        self._fleet.add(session)
        try:
            yield fleet_pb2.ControllerMessage(
                welcome=fleet_pb2.Welcome(
                    run_id=self._progress.run_id,
                    heartbeat_s=self._fleet.heartbeat_s,
                    heartbeat_timeout_s=settings.heartbeat_timeout_s,
                    delivery_key=server_key(self._progress.run_key, session.key.epoch),
                )
            )
            reading = self._read(session, request_iterator)
            async with aclosing(session.outbox.messages(reading)) as messages:
                async for message in messages:
                    yield message.encoded() if isinstance(message, JoinedOrder) else message
        finally:
            self._fleet.remove(session, "its stream ended")

    async def CallEnvironments(  # noqa: N802
        self, request_iterator: AsyncIterator[fleet_pb2.EnvironmentCall], context: CallContext
    ) -> AsyncIterator[fleet_pb2.EnvironmentAnswer]:
        async with aclosing(self._relay.call_environments(request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def _greet(
        self, requests: AsyncIterator[fleet_pb2.ServerMessage], context: CallContext
    ) -> ServerSession:
        config = self._run.config
        clock = self._fleet.clock
        limit_s = config.controller.heartbeat_timeout_s
        hello = (await first_message(requests, context, clock, limit_s=limit_s)).hello
        problem = ""
        reason = Reason.TOO_SMALL
        if problem := _impossible(hello):
            reason = Reason.PROTOCOL
        elif hello.max_episodes < (largest_group := group_sizes_of(config).largest):
            problem = f"room for {hello.max_episodes} episodes, a group has {largest_group}"
        elif hello.max_model_len < config.sampling.max_episode_tokens:
            problem = (
                f"room for {hello.max_model_len} tokens, an episode may have "
                f"{config.sampling.max_episode_tokens}"
            )
        elif hello.queue_bytes < config.queue.max_bytes:
            problem = (
                f"a queue of {hello.queue_bytes} bytes, queue.max_bytes of the controller is "
                f"{config.queue.max_bytes}: leases count on it"
            )
        elif differing := _differing(hello.engine_settings, config.engine_settings):
            problem = f"an engine with {differing}"
            reason = Reason.WRONG_STATE
        elif self._fleet.epochs.was_given(hello.server_epoch):
            # The delivery key is made from the epoch: two servers would share one key.
            problem = f"epoch {hello.server_epoch:x} was given before, draw a new one"
            reason = Reason.PROTOCOL
        elif problem := misfit(self._run, hello):
            reason = Reason.WRONG_STATE
        elif self._progress.is_over:
            problem = "the run is over"
            reason = Reason.WRONG_STATE
        if problem:
            name = hello.server_id[:100]
            code = grpc.StatusCode.FAILED_PRECONDITION
            if self._progress.is_over and self._progress.may_go_on:
                # A server that was started again at once waits for the next controller.
                code = grpc.StatusCode.UNAVAILABLE
            await abort(context, code, f"server {name}: {problem}", reason)
        await self._check_name_is_free(hello, context)
        key = ServerKey(ServerId(hello.server_id), hello.server_epoch)
        return ServerSession(key, hello, clock=self._fleet.clock)

    async def _check_name_is_free(self, hello: fleet_pb2.ServerHello, context: CallContext) -> None:
        """Rejects a server, which will retry, while another process with its name is connected.

        The same process is accepted: it may reconnect before the controller knows that its old
        stream ended.
        """
        older = self._fleet.sessions.get(ServerId(hello.server_id))
        # A server whose hello lacks the process, 0, counts as the same process.
        if older is None or older.hello.process in (0, hello.process) or not hello.process:
            return
        text = (
            f"another process of this name has joined from {older.hello.host} and lives; "
            "choose another --server-id, or end that one"
        )
        if hello.process != older.turned_away:
            older.turned_away = hello.process
            self._run.events.warn(
                f"a second rollout server {older.name}, on {hello.host}, waits: {text}"
            )
        text = f"server {older.name}: {text}"
        await abort(context, grpc.StatusCode.UNAVAILABLE, text, Reason.PLACE_TAKEN)

    async def _read(
        self, session: ServerSession, requests: AsyncIterator[fleet_pb2.ServerMessage]
    ) -> None:
        try:
            async for message in requests:
                if self._fleet.find(session.key) is session:
                    _check_counters(session, message)
                    self._fleet.receive(session, message)
        except grpc.aio.AioRpcError as error:
            self._fleet.remove(session, f"its stream broke: {error.details()}")


def _check_counters(session: ServerSession, message: fleet_pb2.ServerMessage) -> None:
    """Raises ProtocolError if counters are too large or decrease.

    Tokens are limited by the largest speed of an engine, seconds by the time since the server
    joined.
    """
    if message.WhichOneof("message") not in ("heartbeat", "drained"):
        return
    report = message.drained if message.HasField("drained") else message.heartbeat
    served_s = session.clock.now_s() - session.joined_s
    max_tokens = int(MAX_TOKENS_PER_S * (served_s + 1))
    for name in _COUNTERS:
        tokens: int = getattr(report, name)
        if tokens > max_tokens:
            raise ProtocolError(
                f"rollout server {session.name} reports {tokens} {name.replace('_', ' ')} after "
                f"{served_s:.1f} s, at most {MAX_TOKENS_PER_S:.0e} a second are possible"
            )
        before: int = getattr(session.report, name)
        if tokens < before and name != "in_flight_tokens":
            raise ProtocolError(
                f"rollout server {session.name} reports {tokens} {name.replace('_', ' ')} after "
                f"{before}: counters of an epoch never fall"
            )
    # Not the loop's clock, which leaves out stalls of the loop: engines work during those.
    passed_s = time.monotonic() - session.began_s
    for name in ("busy_s", "paused_s", "uptime_s"):
        if getattr(report, name) > passed_s + BEFORE_S:
            raise ProtocolError(
                f"rollout server {session.name} reports {getattr(report, name):g} "
                f"{name.replace('_', ' ')} after {passed_s:.1f} s: they count from its hello on"
            )


def _impossible(hello: fleet_pb2.ServerHello) -> str:
    try:
        check_server_id(hello.server_id)
    except ConfigError as error:
        return str(error)
    if not 1 <= hello.engine_workers <= MAX_ENGINE_WORKERS:
        return f"an engine has 1 to {MAX_ENGINE_WORKERS} workers, got {hello.engine_workers}"
    return ""


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Reports the state of the run; only `StopRun` and `DrainServer` change it."""

    def __init__(
        self, run: ControlledRun, books: Books, scheduler: Scheduler, recorder: RunRecorder
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._book = books.leases
        self._environments = books.environments
        self.fleet = books.fleet
        self._ledger = books.ledger
        self._state = books.state
        self.scheduler = scheduler
        self.recorder = recorder
        mark = f"{run.config.run.name}/{JOURNAL}/{JOURNAL_LOG}"
        self._setup = describe_setup(run.config, run_id=self._progress.run_id, mark=mark)

    async def GetStatus(self, request: pb.GetStatusRequest, context: CallContext) -> pb.RunStatus:  # noqa: N802
        return self.status()

    def status(self) -> pb.RunStatus:
        """Returns the present status of the whole run."""
        progress = self._progress
        training = self._book.training_groups()
        leased = Counter(group.holder for group in self._book.groups.values())
        servers = []
        for session in self.fleet.sessions.values():
            servers.append(describe(session))
            servers[-1].leased_groups = leased[session.key]
        return pb.RunStatus(
            run_id=progress.run_id,
            state=pb.RunState.Name(progress.state),
            cause=progress.cause,
            step=progress.version.step,
            num_steps=self._run.config.run.steps,
            max_staleness=self._run.config.algorithm.max_staleness,
            waiting_for=progress.waiting_for,
            servers=[*servers, *self.fleet.departed.values()],
            environments=[entry.describe() for entry in self._environments.entries.values()],
            ledger=self._ledger.snapshot(),
            leased_groups=len(training),
            complete_groups=sum(group.is_complete for group in training),
            queued_bytes=self.fleet.queued_bytes,
            uptime_s=time.monotonic() - progress.started_s,
            metrics=self.recorder.newest,
            lease_wait="" if progress.is_over else self.scheduler.lease_wait,
            reserved_bytes=self.scheduler.reserved_bytes,
            checkpoint_step=self._state.checkpoint.step,
        )

    async def GetSetup(self, request: pb.GetSetupRequest, context: CallContext) -> pb.Setup:  # noqa: N802
        setup = pb.Setup(unix_time_s=time.time())
        setup.MergeFrom(self._setup)
        return setup

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: CallContext
    ) -> AsyncIterator[pb.Event]:
        async for event in self._run.events.follow(request.after):
            yield event

    async def StopRun(self, request: pb.StopRunRequest, context: CallContext) -> pb.StopRunResponse:  # noqa: N802
        """Stops the run cleanly; with `request.failed` the run ends as failed instead."""
        if request.failed:
            self._progress.fail(request.reason)
        else:
            self._progress.stop(request.reason or "a client asked for it")
        return pb.StopRunResponse()

    async def DrainServer(  # noqa: N802
        self, request: pb.DrainServerRequest, context: CallContext
    ) -> pb.DrainServerResponse:
        """Tells one rollout server to leave, after its episodes have ended or are handed back."""
        session = self.fleet.sessions.get(ServerId(request.server_id))
        if session is None:
            server_ids = ", ".join(sorted(self.fleet.sessions)) or "none"
            text = f"no rollout server {request.server_id} is in the run; there are: {server_ids}"
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, text, Reason.BAD_ARGUMENT)
        reason = request.reason or "a client asked for it"
        self.fleet.order_drain(session, reason, finish=True)
        return pb.DrainServerResponse(warning=self.fleet.warn_without(session))
