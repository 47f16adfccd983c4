"""Relays calls between rollout servers and the clients that serve environments.

Consumes: calls of rollout servers, answers of clients. Produces: the same messages for the other
side, with new call ids. Waits for: messages. Unblocked by: a message, or the end of either stream,
which fails the stream's open calls. Calls to a client that does not read fail, and a rollout server
that does not read loses its stream.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.servers.session import (
    MAX_MESSAGES,
    CallContext,
    Message,
    Outbox,
)
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import fleet_pb2, trajectory_pb2

HELLO_TIMEOUT_S = 10.0


@dataclass(eq=False)
class ClientSession:
    """One client that serves an environment."""

    spec: pb.EnvironmentSpec
    num_tasks: int
    max_episodes: int
    digest: str = ""
    outbox: Outbox[pb.WorkerCommand] = field(default_factory=Outbox)


@dataclass(frozen=True)
class RelayedCall:
    """An open call: the outbox of the server that made it, its call id, and the client.

    `followed` is the key of the episode whose agent the call follows, or "" if it follows none.
    """

    answers: Outbox[fleet_pb2.EnvironmentAnswer]
    call_id: int
    client: ClientSession
    followed: str = ""


class Relay:
    """Connects rollout servers with the clients that serve environments."""

    def __init__(
        self,
        on_arrival: Callable[[ClientSession], str],
        on_departure: Callable[[ClientSession], None],
        clock: LoopClock,
        *,
        max_messages: int = MAX_MESSAGES,
    ) -> None:
        """Takes callbacks for a client's arrival and departure.

        `on_arrival` returns why the client is rejected, or "". By `clock`, a client must send its
        hello within 10 seconds. At most `max_messages` messages wait for one client or server.
        """
        self._max_messages, self._clock = max_messages, clock
        self._on_arrival, self._on_departure = on_arrival, on_departure
        self._clients: dict[str, ClientSession] = {}
        self._calls: dict[int, RelayedCall] = {}
        self._numbers = itertools.count(1)

    async def serve_episodes(
        self, requests: AsyncIterator[pb.WorkerMessage], context: CallContext
    ) -> AsyncGenerator[pb.WorkerCommand, None]:
        """Serves one client from its hello to the end of its stream; yields commands for it."""
        limit_s = HELLO_TIMEOUT_S
        hello = (await first_message(requests, context, self._clock, limit_s=limit_s)).hello
        client = ClientSession(
            hello.spec,
            hello.num_tasks,
            hello.max_episodes,
            hello.digest,
            Outbox(max_messages=self._max_messages),
        )
        refusal = self._on_arrival(client)
        if refusal:
            code = grpc.StatusCode.FAILED_PRECONDITION
            about = {"environment": client.spec.name}
            await abort(context, code, refusal, Reason.BAD_ARGUMENT, about)
        self._clients[client.spec.name] = client
        reader = asyncio.create_task(self._read_answers(client, requests))
        try:
            async for command in client.outbox.messages():
                yield command
            raise_failure(reader)
        finally:
            reader.cancel()
            self._forget(client)

    async def call_environments(
        self, requests: AsyncIterator[fleet_pb2.EnvironmentCall]
    ) -> AsyncGenerator[fleet_pb2.EnvironmentAnswer, None]:
        """Relays a rollout server's calls to clients; yields the answers as they arrive."""
        answers = Outbox[fleet_pb2.EnvironmentAnswer](max_messages=self._max_messages)
        reader = asyncio.create_task(self._read_calls(requests, answers))
        try:
            async for answer in answers.messages():
                yield answer
            raise_failure(reader)
        finally:
            reader.cancel()

    def close(self) -> None:
        """Ends the streams of all clients, at the end of the run."""
        for client in self._clients.values():
            client.outbox.close()

    async def _read_calls(
        self,
        requests: AsyncIterator[fleet_pb2.EnvironmentCall],
        answers: Outbox[fleet_pb2.EnvironmentAnswer],
    ) -> None:
        try:
            async for call in requests:
                client = self._clients.get(call.environment)
                if client is None:
                    cause = f"no client serves {call.environment}"
                    _answer(answers, _lost(call.command.call_id, cause))
                    continue
                number = next(self._numbers)
                # Nothing answers the last part of a reply.
                if not call.command.reply_part.is_last:
                    followed = call.command.follow_agent.episode_key
                    opened = RelayedCall(answers, call.command.call_id, client, followed)
                    self._calls[number] = opened
                command = pb.WorkerCommand()
                command.CopyFrom(call.command)
                command.call_id = number
                if not client.outbox.put(command):
                    self._calls.pop(number, None)
                    cause = f"the client that serves {call.environment} does not read"
                    _answer(answers, _lost(call.command.call_id, cause))
                    self._unfollow(call.command.reply_part.episode_key, answers, cause)
        finally:
            answers.close()

    def _unfollow(
        self, episode: str, answers: Outbox[fleet_pb2.EnvironmentAnswer], cause: str
    ) -> None:
        """Fails the call that follows the agent of `episode`, as part of its reply was lost."""
        for number, call in list(self._calls.items()):
            if episode and call.followed == episode and call.answers is answers:
                del self._calls[number]
                _answer(answers, _lost(call.call_id, cause))

    async def _read_answers(
        self, client: ClientSession, requests: AsyncIterator[pb.WorkerMessage]
    ) -> None:
        try:
            async for message in requests:
                call = self._calls.get(message.call_id)
                # Only the client that got the call may answer it.
                if call is not None and call.client is client:
                    # An agent is followed by one call until its result.
                    if not message.HasField("agent_call"):
                        del self._calls[message.call_id]
                    message.call_id = call.call_id
                    _answer(call.answers, fleet_pb2.EnvironmentAnswer(message=message))
        finally:
            client.outbox.close()

    def _forget(self, client: ClientSession) -> None:
        if self._clients.get(client.spec.name) is client:
            del self._clients[client.spec.name]
        for number, call in list(self._calls.items()):
            if call.client is client:
                del self._calls[number]
                cause = f"the client that served {client.spec.name} left"
                _answer(call.answers, _lost(call.call_id, cause))
        self._on_departure(client)


async def first_message(
    requests: AsyncIterator[Message], context: CallContext, clock: LoopClock, *, limit_s: float
) -> Message:
    """Returns the first message of a stream; rejects the call if none comes within `limit_s`."""
    try:
        return await clock.within(limit_s, anext(requests))
    except (TimeoutError, StopAsyncIteration):
        code, text = grpc.StatusCode.INVALID_ARGUMENT, "the first message is a hello"
        await abort(context, code, text, Reason.PROTOCOL)


def raise_failure(reader: asyncio.Task[None]) -> None:
    """Raises the error that ended a stream's reader, so that the call fails and logs it."""
    if reader.done() and not reader.cancelled():
        reader.result()


def _answer(
    answers: Outbox[fleet_pb2.EnvironmentAnswer], answer: fleet_pb2.EnvironmentAnswer
) -> None:
    """Sends an answer; if the server does not read, ends its stream, and the server reconnects."""
    if not answers.put(answer):
        answers.close()


def _lost(call_id: int, cause: str) -> fleet_pb2.EnvironmentAnswer:
    failure = trajectory_pb2.Failure(kind=trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, message=cause)
    return fleet_pb2.EnvironmentAnswer(message=pb.WorkerMessage(call_id=call_id, failure=failure))
