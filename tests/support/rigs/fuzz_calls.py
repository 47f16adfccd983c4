"""Calls with messages from the fuzzer, to a real controller that has honest callers as well.

A call may be opened first as an honest caller would: a server says hello, a client too, deliveries
are sealed, a trainer registers. What follows then reaches the parts behind the first checks.
"""

import asyncio
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from slipstream.core.types import Branch, GroupId, ServerId, TrajectoryId
from slipstream.protocol.codec import PROTOCOL_VERSION, TRAINER_EPOCH, encode_trajectory
from slipstream.protocol.queue.base import seal
from slipstream.v1 import (
    environment_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    trainer_pb2,
    trajectory_pb2,
)

from support.fakes.plain_trajectory import plain_trajectory
from support.rigs.fuzz_honest import HONEST
from support.rigs.fuzzing import bounded, methods, mutated, nearly, new, random_request

METHODS = {method.name: method for method in methods()}
# Calls with which any holder of the token may stop the run, drain a server or become its trainer.
FATAL = ("StopRun", "DrainServer", "Register")
OPENED = ("Join", "ServeEpisodes", "Deliver")
# Our answers to what a caller does wrong, to a stream that waits, and to one that is asked to end.
KNOWN = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    )
)
# grpc's own client says this when a write met the end of the call; why it ended is lost with it.
HIDDEN = (grpc.StatusCode.INTERNAL, "Internal error from Core")
# Texts that mean something to a run of the fakes.
WORDS = ("e", "fake", "fuzz", "g000001", "g000003", "m:E", "{}", "p1", "new")
STREAM_S = 0.3
CALL_S = 5.0
LONGEST_LINE = 2000
# Stand in deliveries for the run and the server's epoch, which are known when it has joined.
RUN_ID = "r-00000000"
EPOCH = 0x4141414141414141
ITS_OWN = f"g000001.0.0.{EPOCH:x}"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Case:
    """One call: the method, whether it is opened honestly, and what is said then."""

    method: str
    is_opened: bool
    requests: tuple[bytes, ...]


@dataclass
class Answers:
    messages: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def note(
        self, case: Case, code: grpc.StatusCode, details: str, also: Sequence[str]
    ) -> None:
        self.messages += max(1, len(case.requests))
        if (code, details) == HIDDEN:
            self.codes[f"{case.method} hidden"] += 1
            return
        self.codes[f"{case.method} {code.name}"] += 1
        if code not in KNOWN and code.name not in also:
            self.broken.append(f"{case.method}: {code.name}: {details}")
        if "\n" in details or len(details) > LONGEST_LINE:
            self.broken.append(f"{case.method}: not one line: {details[:LONGEST_LINE]}")


def random_case(draw: random.Random, names: Sequence[str]) -> Case:
    method = METHODS[draw.choice(names)]
    many = draw.choice((1, 3, 20)) if method.client_streaming else 1
    # The first that is refused ends a stream: half of them are within all bounds.
    is_bounded = method.client_streaming and draw.random() < 0.5
    requests = tuple(_random_message(method, draw, is_bounded) for _ in range(many))
    if method.name == "Deliver":
        requests = tuple(map(delivery, (random_trajectory(draw) for _ in requests)))
    return Case(method.name, draw.random() < 0.7, requests)


def _random_message(
    method: MethodDescriptor, draw: random.Random, is_bounded: bool
) -> bytes:
    """Half of them are honest ones with one or two other fields, or damaged bytes."""
    message = draw.choice(HONEST.get(method.name, [new(method.input_type)]))
    if is_bounded:
        if draw.random() < 0.5:
            return bounded(method.input_type, draw, WORDS).SerializeToString()
        return nearly(message, draw, WORDS, wild_share=0.0).SerializeToString()
    if draw.random() < 0.5:
        return random_request(method.input_type, draw, WORDS)
    if draw.random() < 0.8:
        return nearly(message, draw, WORDS).SerializePartialToString()
    return mutated(message.SerializeToString(), draw)


def random_trajectory(draw: random.Random) -> bytes:
    """A damaged or made up trajectory, now and then an honest one."""
    way = draw.random()
    if way < 0.5:
        return mutated(draw.choice((honest_trajectory(), honest_tree())), draw)
    if way < 0.95:
        return random_request(trajectory_pb2.Trajectory.DESCRIPTOR, draw, WORDS)
    return draw.choice((honest_trajectory(), honest_tree()))


def delivery(trajectory: bytes, trajectory_id: str = ITS_OWN) -> bytes:
    """The message that delivers these bytes."""
    request = trajectory_pb2.DeliverRequest(
        trajectory=trajectory, trajectory_id=trajectory_id
    )
    return request.SerializeToString()


async def answered(
    channel: grpc.aio.Channel, case: Case, epoch: int = 0
) -> tuple[grpc.StatusCode, str]:
    """How one call ended, and what it says of that; `epoch`: the trainer's, 0: none."""
    method = METHODS[case.method]
    if case.is_opened and case.method == "Deliver":
        return await _delivered(channel, case)
    requests = list(case.requests)
    if case.is_opened and case.method in OPENED:
        requests.insert(0, opening(case.method, f"liar-{next(_numbers) % 64}"))
    metadata = ((TRAINER_EPOCH, str(epoch)),) if epoch else ()
    name = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return await _streamed(channel.stream_stream(name), requests)
    if method.server_streaming:
        call = channel.unary_stream(name)(
            requests[0], timeout=STREAM_S, metadata=metadata
        )
    else:
        call = channel.unary_unary(name)(requests[0], timeout=CALL_S, metadata=metadata)
    return await call.code(), str(await call.details() or "")


async def _streamed(method, requests: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    """Says all requests on one stream, and reads it to its end."""

    async def messages() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    call = method(messages(), timeout=STREAM_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        if is_cancelled_itself():
            raise
    return await call.code(), str(await call.details() or "")


def is_cancelled_itself() -> bool:
    """Whether somebody cancelled this task; else the controller cancelled the call it reads.

    That call may not be done yet: grpc cancels its readers before it has a status.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def opening(method: str, name: str) -> bytes:
    """The first message of an honest caller."""
    if method == "Join":
        return fleet_pb2.ServerMessage(hello=server_hello(name)).SerializeToString()
    spec = environment_pb2.EnvironmentSpec(
        name=name,
        weight=1e-6,
        timeout_s=1.0,
        purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
    )
    hello = environment_pb2.WorkerHello(spec=spec, num_tasks=3, max_episodes=64)
    return environment_pb2.WorkerMessage(hello=hello).SerializeToString()


def server_hello(name: str, epoch: int = 0) -> fleet_pb2.ServerHello:
    return fleet_pb2.ServerHello(
        server_id=name,
        server_epoch=epoch or next(_numbers),
        protocol_version=PROTOCOL_VERSION,
        max_episodes=4,
        engine_workers=1,
        max_model_len=4096,
        queue_bytes=1 << 40,
    )


async def _delivered(
    channel: grpc.aio.Channel, case: Case
) -> tuple[grpc.StatusCode, str]:
    """Deliveries that are sealed by a server that has joined."""
    hello = server_hello("liar-deliver")

    async def messages() -> AsyncIterator[fleet_pb2.ServerMessage]:
        yield fleet_pb2.ServerMessage(hello=hello)
        await asyncio.sleep(CALL_S)

    stream = fleet_pb2_grpc.FleetServiceStub(channel).Join(messages(), timeout=CALL_S)
    try:
        first = await stream.read()
        if not isinstance(first, fleet_pb2.ControllerMessage):
            return await stream.code(), str(await stream.details() or "")
        sealed = [
            _sealed(request, hello, first.welcome, number)
            for number, request in enumerate(case.requests)
        ]
        name = "/slipstream.v1.TrajectoryService/Deliver"
        return await _streamed(channel.stream_stream(name), sealed)
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details() or "")
    except asyncio.CancelledError:
        if is_cancelled_itself():
            raise
        return await stream.code(), str(await stream.details() or "")
    finally:
        stream.cancel()


def _sealed(
    request: bytes,
    hello: fleet_pb2.ServerHello,
    welcome: fleet_pb2.Welcome,
    number: int,
) -> bytes:
    """The delivery under a name of that server, with its seal; as it is if it is no delivery."""
    message = trajectory_pb2.DeliverRequest()
    try:
        message.ParseFromString(request)
    except DecodeError:
        return request
    name = TrajectoryId(f"g{number:06d}.{number % 4}.0.{hello.server_epoch:x}")
    if message.trajectory_id == ITS_OWN:
        name = TrajectoryId(f"g000001.0.0.{hello.server_epoch:x}")
    epoch = hello.server_epoch.to_bytes(8, "little")
    data = message.trajectory.replace(RUN_ID.encode(), welcome.run_id.encode())
    data = data.replace(EPOCH.to_bytes(8, "little"), epoch)
    sealed = seal(welcome.delivery_key, name, data)
    delivery = trajectory_pb2.DeliverRequest(trajectory=sealed, trajectory_id=name)
    return delivery.SerializeToString()


def honest_trajectory(**changes: object) -> bytes:
    """What a server delivers; run and epoch stand for those that it is welcomed with."""
    tokens = 5
    trajectory = plain_trajectory(
        range(3 + tokens),
        (3, tokens),
        run_id=RUN_ID,
        group_id=GroupId("g000001"),
        server_id=ServerId("liar-deliver"),
        server_epoch=EPOCH,
        environment="e",
        task_index=1,
        seed=3,
        reward=0.5,
        metrics={"right": 1.0},
        prompt_text="p",
        reply_text="r",
    )
    return encode_trajectory(dataclasses.replace(trajectory, **changes))


def honest_tree() -> bytes:
    """The same tokens as two conversations of an agent."""
    branches = (Branch(2, 0.5, "reviewer"), Branch(2))
    return honest_trajectory(run_lengths=(1, 3, 2, 2), branches=branches, num_turns=2)


async def registered(channel: grpc.aio.Channel) -> tuple[int, str]:
    """The epoch of a trainer that registers beside the honest one, 0 and why if it may not."""
    hello = trainer_pb2.TrainerHello(
        world_size=1, layout_description="a\nb", num_senders=1
    )
    call = channel.unary_unary("/slipstream.v1.TrainerService/Register")(
        hello.SerializeToString(), timeout=CALL_S
    )
    if await call.code() is not grpc.StatusCode.OK:
        return 0, str(await call.details())
    return trainer_pb2.TrainerWelcome.FromString(await call).trainer_epoch, ""
