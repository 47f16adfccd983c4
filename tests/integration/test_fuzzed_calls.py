"""Random messages into every method of a controller in the middle of a run.

Half of them are random bytes or a damaged message, half are messages with random values in random
fields. Whatever comes, the answer is a status that callers know, and the run goes on to its end.
"""

from __future__ import annotations

import asyncio
import random

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from liars import attacked
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2

FILES = (environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2)
MESSAGES_OF_A_METHOD = 60
# Whoever holds the token may end the run, send a server away, or begin as its trainer.
LEFT_OUT = ("StopRun", "DrainServer", "Register")
# Our answer to what a caller does wrong, to a stream that waits, and to one that is asked to end.
KNOWN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
}
INTEGERS = (0, 1, 2, 5, 77, 2**16, 2**31 - 1, 2**32 - 1, 2**53, 2**64 - 1)
NUMBERS = (0.0, 1.0, -1.0, 0.5, 1e308, -1e308, float("nan"), float("inf"), 5e-324)
TEXTS = (
    "",
    "e",
    "g000001",
    "fake",
    "a\nb",
    "\x1b[2J",
    "..",
    "\u00e4" * 150,
    "x" * 10_000,
    "[" * 500,
)


def methods() -> list[MethodDescriptor]:
    return [
        method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if service.name != "WorkerService" and method.name not in LEFT_OUT
    ]


def scalar(field: FieldDescriptor, draw: random.Random) -> object:
    kind = field.type
    if kind == FieldDescriptor.TYPE_STRING:
        return draw.choice(TEXTS)
    if kind == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice((0, 1, 4, 8, 400)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return draw.choice(NUMBERS)
    if kind == FieldDescriptor.TYPE_ENUM:
        return draw.choice((0, 1, 2, 3, 4, 5, 99))
    most = 2**32 - 1 if kind in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32) else 0
    value = draw.choice(INTEGERS)
    if kind == FieldDescriptor.TYPE_SINT64:
        return min(value, 2**63 - 1)
    return min(value, most) if most else value


def fill(message: Message, draw: random.Random, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.4 or depth > 3:
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            value = scalar(entry.fields_by_name["value"], draw)
            getattr(message, field.name)[scalar(entry.fields_by_name["key"], draw)] = value
        elif field.is_repeated:
            for _ in range(draw.choice((0, 1, 3))):
                if entry is not None:
                    fill(getattr(message, field.name).add(), draw, depth + 1)
                else:
                    getattr(message, field.name).append(scalar(field, draw))
        elif entry is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), draw, depth + 1)
        else:
            setattr(message, field.name, scalar(field, draw))


def random_request(kind: Descriptor, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return draw.randbytes(draw.choice((0, 1, 10, 1000)))
    message = message_factory.GetMessageClass(kind)()
    fill(message, draw)
    data = bytearray(message.SerializePartialToString())
    if data and draw.random() < 0.3:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


async def answer(
    channel: grpc.aio.Channel, method: MethodDescriptor, requests: list[bytes]
) -> tuple[grpc.StatusCode, str]:
    """How one call ended, and what it says of that."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        call = channel.stream_stream(name)(timeout=0.5)
        try:
            for request in requests:
                await call.write(request)
            await call.done_writing()
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return await call.code(), await call.details()
    if method.server_streaming:
        call = channel.unary_stream(name)(requests[0], timeout=0.5)
    else:
        call = channel.unary_unary(name)(requests[0], timeout=5)
    return await call.code(), await call.details()


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_messages_get_known_answers_and_the_run_goes_on(tmp_path, caplog, seed):
    unknown = []

    async def attack(channel, server):
        for method in methods():
            draw = random.Random(f"{seed}/{method.full_name}")
            many = [
                [random_request(method.input_type, draw) for _ in range(draw.choice((1, 3)))]
                for _ in range(MESSAGES_OF_A_METHOD)
            ]
            ends = await asyncio.gather(*(answer(channel, method, each) for each in many))
            unknown.extend((method.full_name, *end) for end in ends if end[0] not in KNOWN)

    await attacked(tmp_path, caplog, attack)
    assert unknown == []
