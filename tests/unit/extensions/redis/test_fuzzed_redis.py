"""Entries that no sender of ours writes, placed into the stream of a real Valkey.

What is sealed arrives; everything else is removed, and the receiver goes on.
"""

import asyncio
import random

import pytest
import redis.asyncio
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.connection import DELIVERY
from slipstream.extensions.redis.receiver import RedisReceiver
from slipstream.protocol.queue.base import opener, seal, server_key
from slipstream.v1 import trajectory_pb2
from support.rigs.fuzz_budget import BUDGET
from support.rigs.fuzzing import TEXTS, mutated
from support.rigs.waiting import LIMIT_S

pytestmark = pytest.mark.process

KEY = b"k" * 32
STREAM = "slipstream:run:trajectories"
BYTES = "slipstream:run:bytes"


def honest(number: int) -> tuple[TrajectoryId, bytes]:
    """The id and the sealed bytes of a delivery."""
    name = TrajectoryId(f"g{number:06d}.0.0.7")
    return name, seal(server_key(KEY, 7), name, b"data %d" % number)


def fields_of(name: str, data: bytes, **sent: int) -> dict[bytes, bytes]:
    request = trajectory_pb2.DeliverRequest(trajectory_id=name, trajectory=data)
    request.sent.CopyFrom(trajectory_pb2.Amount(**sent))
    return {DELIVERY: request.SerializeToString()}


def entry(number: int, draw: random.Random) -> dict[bytes, bytes]:
    """Fields of an entry: others than a sender writes, or other values, or none of them right."""
    name, data = honest(number)
    match draw.randrange(7):
        case 0:
            return {DELIVERY: mutated(fields_of(name, data)[DELIVERY], draw)}
        case 1:
            return fields_of(name, mutated(data, draw))
        case 2:
            return fields_of("", data)
        case 3:
            return {b"other": b"x"}
        case 4:
            return fields_of(draw.choice(TEXTS), data)
        case 5:
            return fields_of(
                name, draw.randbytes(draw.choice((0, 1, 15, 16, 17, 5000)))
            )
        case _:
            return {draw.randbytes(3): draw.randbytes(9)}


async def place(client: redis.asyncio.Redis, entries: list[dict[bytes, bytes]]) -> None:
    """Adds entries at one moment; nobody counts their bytes."""
    async with client.pipeline(transaction=True) as pipeline:
        for fields in entries:
            pipeline.xadd(STREAM, fields)
        await pipeline.execute()


async def test_what_nobody_sealed_is_removed_and_the_others_arrive(
    server, administrator
) -> None:
    draw = random.Random("redis")
    rounds = BUDGET.rounds
    client = administrator
    async with (
        RedisReceiver(server.url(), "run", opener(KEY)) as receiver,
        asyncio.timeout(LIMIT_S),
    ):
        arrived = {}

        async def take() -> None:
            while True:
                delivery = await receiver.get()
                # A damaged entry may be whole: its seal says so.
                assert (
                    opener(KEY)(delivery.trajectory_id, seal_of(delivery)) is not None
                )
                arrived[delivery.trajectory_id] = delivery.data
                await receiver.acknowledge([delivery.trajectory_id])

        taking = asyncio.create_task(take())
        for number in range(rounds):
            name, data = honest(number)
            bad = [entry(1000 + number, draw) for _ in range(20)]
            await place(client, [*bad[:10], fields_of(name, data), *bad[10:]])
        while await client.xlen(STREAM):
            await asyncio.sleep(0.005)
        taking.cancel()
    assert [arrived[honest(n)[0]] for n in range(rounds)] == [
        b"data %d" % n for n in range(rounds)
    ]


def seal_of(delivery) -> bytes:
    return seal(server_key(KEY, 7), delivery.trajectory_id, delivery.data)
