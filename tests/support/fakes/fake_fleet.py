"""The controller's side of the fleet protocol, over real gRPC on the loopback, played by a test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from slipstream.client.environment import Environment
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.types import PolicyVersion, Trajectory
from slipstream.protocol.access.security import CHANNEL_OPTIONS
from slipstream.protocol.codec import decode_trajectory, version_to_pb
from slipstream.protocol.queue.base import SEAL_BYTES
from slipstream.v1 import (
    calls_pb2,
    calls_pb2_grpc,
    environment_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    trajectory_pb2,
    trajectory_pb2_grpc,
    weights_pb2,
)

from support.fakes.fake_engine import DIGESTS
from support.rigs.waiting import LIMIT_S

Answer = environment_pb2.WorkerMessage

SAMPLING = fleet_pb2.SamplingSettings(
    temperature=1.0, top_p=1.0, max_reply_tokens=4, max_turns=4, max_episode_tokens=32
)


class Connection:
    def __init__(self, hello: fleet_pb2.ServerHello) -> None:
        self.hello = hello
        self.orders: asyncio.Queue[fleet_pb2.ControllerMessage | None] = asyncio.Queue()
        self.messages: list[fleet_pb2.ServerMessage] = []
        self.ended = asyncio.Event()
        self._changed = asyncio.Condition()

    def send(self, **message: object) -> None:
        self.orders.put_nowait(fleet_pb2.ControllerMessage(**message))

    def hang_up(self) -> None:
        self.orders.put_nowait(None)

    async def received(self, message: fleet_pb2.ServerMessage) -> None:
        async with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    async def wait_for(
        self, kind: str, accept: Callable[[object], bool] = lambda _: True
    ) -> object:
        """The first message of this kind that `accept` takes, waiting for it if need be."""

        def found() -> object | None:
            for message in self.messages:
                if message.WhichOneof("message") == kind and accept(
                    getattr(message, kind)
                ):
                    return getattr(message, kind)
            return None

        async with self._changed, asyncio.timeout(LIMIT_S):
            await self._changed.wait_for(lambda: found() is not None)
        return found()

    async def wait_quiet(self) -> fleet_pb2.ServerReport:
        """The first heartbeat from now on that shows no open episode."""
        start = len(self.messages)

        def quiet() -> fleet_pb2.ServerReport | None:
            for message in self.messages[start:]:
                beat = message.heartbeat
                if message.HasField("heartbeat") and not beat.open_episodes:
                    return beat
            return None

        async with self._changed, asyncio.timeout(LIMIT_S):
            await self._changed.wait_for(lambda: quiet() is not None)
        return quiet()

    async def publish_phase(
        self, publish_id: str, phase: int
    ) -> fleet_pb2.PublishReport:
        return await self.wait_for(
            "publish",
            lambda report: report.publish_id == publish_id and report.phase == phase,
        )

    async def serve_version(
        self,
        step: int,
        *,
        probe: weights_pb2.Probe | None = None,
        digests: Sequence[bytes] = DIGESTS,
    ) -> fleet_pb2.PublishReport:
        """A whole publish, against an engine that needs no real bytes."""
        publish_id = f"p{step}-{len(self.messages)}"
        version = version_to_pb(PolicyVersion(0, step))
        self.send(
            prepare=fleet_pb2.PreparePublish(publish_id=publish_id, version=version)
        )
        await self.publish_phase(publish_id, fleet_pb2.PUBLISH_PHASE_READY)
        order = weights_pb2.PublishOrder(publish_id=publish_id, version=version)
        self.send(receive=fleet_pb2.ReceiveWeights(order=order))
        await self.publish_phase(publish_id, fleet_pb2.PUBLISH_PHASE_LOADED)
        commit = fleet_pb2.CommitPublish(
            publish_id=publish_id, version=version, probe=probe, bucket_digests=digests
        )
        self.send(commit=commit)
        return await self.publish_phase(publish_id, fleet_pb2.PUBLISH_PHASE_SERVING)

    def lease(
        self, group_id: str, environment: str = "fake", **changes: object
    ) -> None:
        lease = {
            "group_id": group_id,
            "environment": environment,
            "task_index": 3,
            "seed": 7,
            "members": [0, 1, 2, 3],
            "purpose": trajectory_pb2.EPISODE_PURPOSE_TRAINING,
            "sampling": SAMPLING,
            "max_attempts": 3,
            "timeout_s": 5.0,
        }
        self.send(lease=fleet_pb2.Lease(**(lease | changes)))


class FakeFleet(
    fleet_pb2_grpc.FleetServiceServicer,
    trajectory_pb2_grpc.TrajectoryServiceServicer,
    status_pb2_grpc.StatusServiceServicer,
    calls_pb2_grpc.CallRecordServiceServicer,
):
    """Serves while it is entered; acknowledges trajectories as long as `acknowledging`."""

    def __init__(
        self, *, heartbeat_s: float = 0.02, heartbeat_timeout_s: float = 0.2
    ) -> None:
        self.welcome = fleet_pb2.Welcome(
            run_id="test-run",
            heartbeat_s=heartbeat_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.trajectories: list[Trajectory] = []
        self.acknowledging = True
        # Answers calls to environments that clients serve; None: it hangs up on such a call.
        self.client: (
            Callable[[fleet_pb2.EnvironmentCall], Answer | Awaitable[Answer]] | None
        ) = None
        # The epochs that it names when asked; None: it does not answer.
        self.known: set[int] | None = set()
        self.asked = 0
        # The kept calls of agents, by group and member; while it is not set, they are not taken.
        self.calls: dict[tuple[str, int], list[calls_pb2.CallRecord]] = {}
        self.takes_calls = asyncio.Event()
        self.takes_calls.set()
        self._arrived = asyncio.Condition()
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)
        trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(self, self._server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self, self._server)
        calls_pb2_grpc.add_CallRecordServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.refusal = ""

    async def __aenter__(self) -> FakeFleet:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)

    def serve(self, environment: Environment[Any]) -> None:
        """Answers calls as a client does that serves an environment."""
        host = EpisodeHost(environment)
        self.client = lambda call: host.answer(call.command)

    async def joined(self, limit_s: float = LIMIT_S) -> Connection:
        return await asyncio.wait_for(self.connections.get(), limit_s)

    async def wait_trajectories(
        self, number: int, limit_s: float = LIMIT_S
    ) -> list[Trajectory]:
        async with self._arrived, asyncio.timeout(limit_s):
            await self._arrived.wait_for(lambda: len(self.trajectories) >= number)
        return self.trajectories

    async def Join(
        self,
        requests: AsyncIterator[fleet_pb2.ServerMessage],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[fleet_pb2.ControllerMessage]:
        hello = (await anext(requests)).hello
        if self.refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        connection = Connection(hello)
        if self.known is not None:
            self.known.add(hello.server_epoch)
        yield fleet_pb2.ControllerMessage(welcome=self.welcome)
        self.connections.put_nowait(connection)

        async def read() -> None:
            async for message in requests:
                await connection.received(message)
            connection.hang_up()

        reader = asyncio.create_task(read())
        try:
            while (order := await connection.orders.get()) is not None:
                yield order
        finally:
            reader.cancel()
            connection.ended.set()

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> status_pb2.RunStatus:
        self.asked += 1
        while self.known is None:
            await asyncio.sleep(0.01)
        serving = fleet_pb2.SERVER_STATE_SERVING
        servers = [
            status_pb2.ServerStatus(server_epoch=e, state=serving) for e in self.known
        ]
        return status_pb2.RunStatus(servers=servers)

    async def Begin(
        self, request: calls_pb2.BeginEpisodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[calls_pb2.CallRecord]:
        episode = (request.episode.group_id, request.episode.member)
        if request.anew:
            self.calls.pop(episode, None)
        for record in self.calls.get(episode, ()):
            yield record

    async def Keep(
        self, request: calls_pb2.KeepCallRequest, context: grpc.aio.ServicerContext
    ) -> calls_pb2.KeepCallResponse:
        if not self.takes_calls.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        episode = (request.episode.group_id, request.episode.member)
        self.calls.setdefault(episode, []).append(request.record)
        return calls_pb2.KeepCallResponse()

    async def CallEnvironments(
        self,
        requests: AsyncIterator[fleet_pb2.EnvironmentCall],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[fleet_pb2.EnvironmentAnswer]:
        async for call in requests:
            if self.client is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "no client")
            answer = self.client(call)
            message = await answer if inspect.isawaitable(answer) else answer
            message.call_id = call.command.call_id
            yield fleet_pb2.EnvironmentAnswer(message=message)

    async def Deliver(
        self,
        requests: AsyncIterator[trajectory_pb2.DeliverRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[trajectory_pb2.DeliverResponse]:
        async for request in requests:
            async with self._arrived:
                self.trajectories.append(
                    decode_trajectory(request.trajectory[SEAL_BYTES:])
                )
                self._arrived.notify_all()
            if self.acknowledging:
                yield trajectory_pb2.DeliverResponse(
                    acknowledged_ids=[request.trajectory_id]
                )
