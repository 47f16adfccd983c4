"""What only the gRPC queue promises: senders keep everything, the receiver holds them back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from slipstream.core.errors import QueueError
from slipstream.core.types import TrajectoryId
from slipstream.protocol.access.security import Credentials, create_server, open_channel
from slipstream.protocol.queue.grpc import GrpcReceiver, GrpcSender
from slipstream.v1 import trajectory_pb2 as pb
from slipstream.v1 import trajectory_pb2_grpc
from support.rigs.waiting import until

LIMIT_S = 20.0
OPEN = Credentials(certificate=None, key=None, ca=None, token=None)


@asynccontextmanager
async def serving(servicer, folder, token=None):
    server = create_server(OPEN, unix_token=token)
    trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(servicer, server)
    address = f"unix:{folder}/queue.sock"
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address, OPEN) as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize("puts_first", [False, True])
async def test_a_refused_sender_ends_with_the_reason(tmp_path: Path, puts_first: bool) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with (
            serving(GrpcReceiver(), tmp_path, "r" * 32) as channel,
            GrpcSender(channel, OPEN, 1_000) as sender,
        ):
            if puts_first:
                await sender.put(TrajectoryId("a"), b"x", timeout_s=LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, QueueError)
    assert str(error) == (
        "trajectories are refused: the token is missing or wrong (security.token_file)"
    )


async def test_streams_that_break_at_any_moment_lose_nothing(tmp_path: Path) -> None:
    """Every third message breaks its stream, before or after it was taken."""
    taken: list[str] = []
    count = 0

    class Breaking(trajectory_pb2_grpc.TrajectoryServiceServicer):
        async def Deliver(  # noqa: N802
            self, requests: AsyncIterator[pb.DeliverRequest], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[pb.DeliverResponse]:
            nonlocal count
            async for request in requests:
                count += 1
                if count % 6 == 3:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken before")
                taken.append(request.trajectory_id)
                if count % 6 == 0:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken after")
                yield pb.DeliverResponse(acknowledged_ids=[request.trajectory_id])

    async with serving(Breaking(), tmp_path) as channel, GrpcSender(channel, OPEN, 1_000) as sender:
        for number in range(10):
            await sender.put(TrajectoryId(str(number)), b"x", timeout_s=LIMIT_S)
        await until(lambda: not sender.queued_bytes, LIMIT_S)
    assert set(taken) == {str(number) for number in range(10)}


async def test_an_id_acknowledged_while_its_stream_was_broken_is_acknowledged_on_the_next(tmp_path):
    async with GrpcReceiver() as receiver, serving(receiver, tmp_path) as channel:
        stub = trajectory_pb2_grpc.TrajectoryServiceStub(channel)
        first = stub.Deliver()
        await first.write(pb.DeliverRequest(trajectory=b"x", trajectory_id="a"))
        await receiver.get()
        first.cancel()
        await receiver.acknowledge([TrajectoryId("a")])
        second = stub.Deliver()
        await second.write(pb.DeliverRequest(trajectory=b"x", trajectory_id="a"))
        async with asyncio.timeout(LIMIT_S):
            assert list((await second.read()).acknowledged_ids) == ["a"]
        second.cancel()


async def test_a_receiver_that_nobody_reads_holds_its_senders_back(tmp_path: Path) -> None:
    size = 1 << 20
    async with (
        GrpcReceiver(max_waiting_bytes=2 * size) as receiver,
        serving(receiver, tmp_path) as channel,
    ):
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


async def test_a_trajectory_larger_than_the_receivers_bound_passes(tmp_path: Path) -> None:
    async with (
        GrpcReceiver(max_waiting_bytes=10) as receiver,
        serving(receiver, tmp_path) as channel,
        GrpcSender(channel, OPEN, 1_000) as sender,
    ):
        for number in range(3):
            await sender.put(TrajectoryId(str(number)), b"x" * 100, timeout_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            for number in range(3):
                assert (await receiver.get()).trajectory_id == str(number)
