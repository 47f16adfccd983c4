"""What every trajectory queue promises, tried on all of them, and what only gRPC's does."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
import pytest
from slipstream.core.errors import QueueError, TrajectoryQueueFull
from slipstream.core.machine.address import free_port
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.queue import RedisSender
from slipstream.extensions.redis.receiver import RedisReceiver
from slipstream.learner.controller.records.ledger import AccountedReceiver
from slipstream.protocol.access.security import (
    Credentials,
    bind,
    create_server,
    open_channel,
)
from slipstream.protocol.queue.base import TrajectoryReceiver, TrajectorySender
from slipstream.protocol.queue.grpc import GrpcReceiver, GrpcSender
from slipstream.v1 import trajectory_pb2 as pb
from slipstream.v1 import trajectory_pb2_grpc
from support.fakes.queue_seals import without_seal
from support.rigs.valkey import EmbeddedServer
from support.rigs.waiting import LIMIT_S, until

OPEN = Credentials()


class Place(Protocol):
    """Where senders and receivers of one run meet."""

    def sender(self) -> AbstractAsyncContextManager[TrajectorySender]: ...

    def receiver(self) -> AbstractAsyncContextManager[TrajectoryReceiver]: ...


MakePlace = Callable[[int], Place]


class GrpcPlace:
    def __init__(self, max_bytes: int) -> None:
        # A port rather than a unix socket: gRPC removes the file of a stopped server late.
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.max_bytes = max_bytes

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[TrajectorySender]:
        async with (
            open_channel(self.address, OPEN) as channel,
            GrpcSender(channel, (), self.max_bytes) as sender,
        ):
            yield sender

    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[TrajectoryReceiver]:
        server = create_server(OPEN)
        receiver = GrpcReceiver(without_seal)
        trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(receiver, server)
        bind(server, self.address, OPEN)
        await server.start()
        yield receiver
        await server.stop(None)


class RedisPlace:
    def __init__(self, server: EmbeddedServer, max_bytes: int) -> None:
        self.server = server
        self.max_bytes = max_bytes

    def sender(self) -> AbstractAsyncContextManager[TrajectorySender]:
        return RedisSender(self.server.url("rollout"), "run", self.max_bytes)

    def receiver(self) -> AbstractAsyncContextManager[TrajectoryReceiver]:
        return RedisReceiver(self.server.url(), "run", without_seal)


@pytest.fixture(params=["grpc", pytest.param("redis", marks=pytest.mark.process)])
async def make_place(request, tmp_path):
    """A function that makes a place; its argument is the bytes that the place holds."""
    if request.param == "grpc":
        yield GrpcPlace
        return
    async with EmbeddedServer(tmp_path / "valkey") as server:
        # The controller opens the queue before rollout servers do.
        async with RedisReceiver(server.url(), "run", without_seal):
            pass
        yield partial(RedisPlace, server)


def name(number: int) -> TrajectoryId:
    return TrajectoryId(f"group.{number}")


async def put(sender: TrajectorySender, *numbers: int, size: int = 100) -> None:
    for number in numbers:
        await sender.put(
            name(number), number.to_bytes(4) * (size // 4), timeout_s=LIMIT_S
        )


async def get(receiver: TrajectoryReceiver, count: int) -> list[int]:
    """Takes `count` trajectories and checks that names and data belong together."""
    numbers = []
    for _ in range(count):
        delivery = await asyncio.wait_for(receiver.get(), LIMIT_S)
        number = int.from_bytes(delivery.data[:4])
        assert delivery.trajectory_id == name(number)
        numbers.append(number)
    return numbers


@asynccontextmanager
async def both_ends(
    place: Place,
) -> AsyncIterator[tuple[TrajectoryReceiver, TrajectorySender]]:
    async with place.receiver() as receiver, place.sender() as sender:
        yield receiver, sender


async def test_trajectories_of_all_senders_arrive(make_place: MakePlace) -> None:
    place = make_place(100_000)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(place.receiver())
        for index in range(3):
            sender = await stack.enter_async_context(place.sender())
            await put(sender, *range(10 * index, 10 * index + 10))
        assert sorted(await get(receiver, 30)) == list(range(30))


async def test_what_was_put_before_a_receiver_came_arrives(
    make_place: MakePlace,
) -> None:
    place = make_place(1_000)
    async with place.sender() as sender:
        await put(sender, 1, 2)
        async with place.receiver() as receiver:
            assert await get(receiver, 2) == [1, 2]


async def test_put_waits_while_the_queue_is_full_and_goes_on_after_an_acknowledgement(
    make_place,
):
    async with both_ends(make_place(300)) as (receiver, sender):
        await put(sender, 0, 1, 2)
        assert sender.queued_bytes == 300
        waiting = asyncio.ensure_future(put(sender, 3))
        assert await get(receiver, 3) == [0, 1, 2]
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        await receiver.acknowledge([name(1)])
        await asyncio.wait_for(waiting, LIMIT_S)
        assert await get(receiver, 1) == [3]


async def test_put_that_finds_no_room_in_time_raises_and_leaves_the_queue_as_it_was(
    make_place,
):
    async with both_ends(make_place(250)) as (receiver, sender):
        await put(sender, 0, 1)
        with pytest.raises(
            TrajectoryQueueFull, match=r"no room for 100 bytes within 0.05 s"
        ):
            await sender.put(name(2), b"x" * 100, timeout_s=0.05)
        assert await get(receiver, 2) == [0, 1]
        await receiver.acknowledge([name(0), name(1)])
        await put(sender, 3)
        assert await get(receiver, 1) == [3]


async def test_put_of_more_than_the_whole_queue_is_refused(
    make_place: MakePlace,
) -> None:
    async with both_ends(make_place(300)) as (_, sender):
        with pytest.raises(
            QueueError, match=r"301 bytes does not fit queue.max_bytes = 300"
        ):
            await sender.put(name(0), b"x" * 301, timeout_s=LIMIT_S)


async def test_a_new_receiver_is_given_what_the_last_one_did_not_acknowledge(
    make_place,
):
    place = make_place(100_000)
    async with place.sender() as sender:
        async with place.receiver() as first:
            assert not first.backlog
            await put(sender, *range(40))
            assert await get(first, 30) == list(range(30))
            await first.acknowledge(map(name, range(10)))
            await until(lambda: sender.queued_bytes == 3_000)
        async with place.receiver() as second:
            # A trajectory that no queue holds is named by its sender when it comes back.
            waiting = second.backlog or sender.undelivered
            assert list(waiting) == [name(number) for number in range(10, 40)]
            assert await get(second, 30) == list(range(10, 40))


async def test_a_receiver_knows_what_lies_in_the_queue_before_it_has_read_it(
    make_place,
):
    place = make_place(100_000)
    async with place.sender() as sender, place.receiver() as receiver:
        # More than a receiver reads before somebody takes them.
        await put(sender, *range(60))
        for _ in range(2):
            waiting = {*await receiver.waiting(), *sender.undelivered}
            assert waiting == set(map(name, range(60)))
        assert await get(receiver, 60) == list(range(60))
        await receiver.acknowledge(map(name, range(60)))
        await until(lambda: not sender.queued_bytes)
        await put(sender, 60)
        waiting = {*await receiver.waiting(), *sender.undelivered}
        assert name(60) in waiting
        # Entries that were read last may be named once more.
        assert len(waiting) <= 17


async def test_an_id_that_is_put_twice_is_delivered_at_least_once_and_forgotten_once(
    make_place,
):
    async with both_ends(make_place(100_000)) as (receiver, sender):
        await put(sender, 1, 1, 2)
        seen: list[int] = []
        while 2 not in seen:
            seen += await get(receiver, 1)
        assert set(seen) == {1, 2}
        await receiver.acknowledge([name(1), name(2)])
        await until(lambda: sender.queued_bytes == 0)


async def test_an_acknowledged_id_that_is_put_again_does_not_stay_in_the_queue(
    make_place,
):
    async with both_ends(make_place(100_000)) as (receiver, sender):
        await put(sender, 1)
        await get(receiver, 1)
        await receiver.acknowledge([name(1)])
        await until(lambda: sender.queued_bytes == 0)
        await put(sender, 1, 2)
        while await get(receiver, 1) != [2]:
            await receiver.acknowledge([name(1)])
        await receiver.acknowledge([name(2)])
        await until(lambda: sender.queued_bytes == 0)


async def test_a_cancelled_get_loses_nothing(make_place: MakePlace) -> None:
    async with both_ends(make_place(1_000)) as (receiver, sender):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.get(), 0.05)
        await put(sender, 1)
        assert await get(receiver, 1) == [1]


async def test_a_cancelled_put_gives_its_place_in_the_line_to_the_next(make_place):
    async with both_ends(make_place(100)) as (receiver, sender):
        await put(sender, 0)
        first, second = (
            asyncio.ensure_future(put(sender, number)) for number in (1, 2)
        )
        await get(receiver, 1)
        first.cancel()
        await asyncio.wait([first])
        await receiver.acknowledge([name(0)])
        await asyncio.wait_for(second, LIMIT_S)
        assert await get(receiver, 1) == [2]


async def test_a_closed_sender_refuses(make_place: MakePlace) -> None:
    async with both_ends(make_place(1_000)) as (_, sender):
        pass
    with pytest.raises(QueueError, match="closed"):
        await put(sender, 1)


async def test_a_trajectory_that_is_put_twice_while_there_is_no_room_leaves_no_bytes_behind(
    make_place: MakePlace,
) -> None:
    async with both_ends(make_place(250)) as (receiver, sender):
        await put(sender, 1, size=200)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(put(sender, 2))
            assert await get(receiver, 1) == [1]
            await receiver.acknowledge([name(1)])
        assert await get(receiver, 1) == [2]
        await receiver.acknowledge([name(2)])
        await until(lambda: sender.queued_bytes == 0)


@asynccontextmanager
async def serving(servicer, folder, token=None):
    server = create_server(Credentials(token=token))
    trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(servicer, server)
    address = f"unix:{folder}/queue.sock"
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address, OPEN) as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize("puts_first", [False, True])
async def test_a_refused_sender_ends_with_the_reason(
    tmp_path: Path, puts_first: bool
) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with (
            serving(GrpcReceiver(without_seal), tmp_path, "r" * 32) as channel,
            GrpcSender(channel, (), 1_000) as sender,
        ):
            if puts_first:
                await sender.put(TrajectoryId("a"), b"x", timeout_s=LIMIT_S)
            await asyncio.wait_for(asyncio.Event().wait(), LIMIT_S)
    (error,) = caught.value.exceptions
    assert isinstance(error, QueueError)
    assert str(error) == (
        "trajectories are refused: the token is missing or wrong (security.token_file)"
    )


async def test_streams_that_break_at_any_moment_lose_nothing(
    tmp_path: Path, caplog
) -> None:
    """Every third message breaks its stream, before or after it was taken."""
    trajectory_ids: list[str] = []
    count = 0

    class Breaking(trajectory_pb2_grpc.TrajectoryServiceServicer):
        async def Deliver(  # noqa: N802
            self,
            requests: AsyncIterator[pb.DeliverRequest],
            context: grpc.aio.ServicerContext,
        ) -> AsyncIterator[pb.DeliverResponse]:
            nonlocal count
            async for request in requests:
                count += 1
                if count % 6 == 3:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken before")
                trajectory_ids.append(request.trajectory_id)
                if count % 6 == 0:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken after")
                yield pb.DeliverResponse(acknowledged_ids=[request.trajectory_id])

    async with (
        serving(Breaking(), tmp_path) as channel,
        GrpcSender(channel, (), 1_000) as sender,
    ):
        for number in range(10):
            await sender.put(TrajectoryId(str(number)), b"x", timeout_s=LIMIT_S)
        await until(lambda: not sender.queued_bytes, LIMIT_S)
    assert set(trajectory_ids) == {str(number) for number in range(10)}
    # The log tells how much is on its way each time. The cause is gRPC's own, "Internal error from
    # Core", where a write fails before the server's words are read.
    message = r"was lost: .+; \d+ trajectories of \d+ bytes are sent again in \d"
    assert re.search(message, caplog.text)


async def test_an_id_acknowledged_while_its_stream_was_broken_is_acknowledged_on_the_next(
    tmp_path,
):
    receiver = AccountedReceiver(GrpcReceiver(without_seal))
    async with serving(receiver._receiver, tmp_path) as channel:
        stub = trajectory_pb2_grpc.TrajectoryServiceStub(channel)
        first = stub.Deliver()
        await first.write(pb.DeliverRequest(trajectory=b"x", trajectory_id="a"))
        await receiver.get()
        first.cancel()
        await receiver.acknowledge([TrajectoryId("a")])
        second = stub.Deliver()
        next_get = asyncio.ensure_future(receiver.get())
        await second.write(pb.DeliverRequest(trajectory=b"x", trajectory_id="a"))
        assert list(
            (await asyncio.wait_for(second.read(), LIMIT_S)).acknowledged_ids
        ) == ["a"]
        assert not next_get.done()
        next_get.cancel()
        second.cancel()


async def test_a_receiver_that_nobody_reads_holds_its_senders_back(
    tmp_path: Path,
) -> None:
    size = 1 << 20
    receiver = GrpcReceiver(without_seal, max_waiting_bytes=2 * size)
    async with serving(receiver, tmp_path) as channel:
        call = trajectory_pb2_grpc.TrajectoryServiceStub(channel).Deliver()
        sent = 0

        async def send() -> None:
            nonlocal sent
            for number in range(40):
                await call.write(
                    pb.DeliverRequest(trajectory=bytes(size), trajectory_id=str(number))
                )
                sent += 1

        sending = asyncio.ensure_future(send())
        await asyncio.wait([sending], timeout=0.5)
        assert sent < 30
        async with asyncio.timeout(LIMIT_S):
            for number in range(40):
                assert (await receiver.get()).trajectory_id == str(number)
            await sending
        call.cancel()


async def test_a_trajectory_larger_than_the_receivers_bound_passes(
    tmp_path: Path,
) -> None:
    receiver = GrpcReceiver(without_seal, max_waiting_bytes=10)
    async with (
        serving(receiver, tmp_path) as channel,
        GrpcSender(channel, (), 1_000) as sender,
    ):
        for number in range(3):
            await sender.put(TrajectoryId(str(number)), b"x" * 100, timeout_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            for number in range(3):
                assert (await receiver.get()).trajectory_id == str(number)
