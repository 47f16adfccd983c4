"""Calls whose caller has gone, and large requests: what the interceptor makes of them."""

import asyncio
import gc
import logging
import threading

import grpc
import grpc.aio
import pytest
from slipstream.core.errors import ProtocolError
from slipstream.protocol.access import checked_calls
from slipstream.protocol.access.checked_calls import SMALL_BYTES, CheckingInterceptor
from slipstream.protocol.access.security import Credentials, create_server, open_channel
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    status_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
)

OPEN = Credentials()
REGISTER = "/slipstream.v1.TrainerService/Register"


class Context:
    """A call whose caller may have gone: nothing can be said to it then."""

    def __init__(self, *, is_gone: bool = True) -> None:
        self.is_gone = is_gone
        self.said: list[str] = []

    async def abort(
        self, code: grpc.StatusCode, details: str, metadata: object
    ) -> None:
        if self.is_gone:
            raise grpc.aio.InternalError("the batch failed")
        self.said.append(details)
        raise grpc.aio.AbortError(details)


class Call:
    """What grpc tells an interceptor of a call."""

    method = REGISTER


async def checked(inner) -> grpc.RpcMethodHandler:
    async def continuation(details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(inner)

    return await CheckingInterceptor().intercept_service(continuation, Call())


async def test_a_caller_that_is_gone_is_told_nothing() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(
            Context(), grpc.StatusCode.NOT_FOUND, "no such server", Reason.BAD_ARGUMENT
        )


@pytest.mark.parametrize(
    "error",
    [ProtocolError("bad"), grpc.aio.InternalError("of a write"), ValueError("ours")],
)
async def test_a_call_that_fails_for_a_caller_that_is_gone_ends_quietly(
    error, caplog
) -> None:
    async def inner(request: object, context: object) -> None:
        raise error

    handler = await checked(inner)
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(b"", Context())
    # A fault of ours is logged, whoever called.
    assert len(caplog.records) == isinstance(error, ValueError)


def test_what_grpc_says_of_a_caller_that_is_gone_is_no_news(caplog) -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    for error in (grpc.aio.InternalError("gone"), ValueError("ours")):
        try:
            raise error
        except type(error):
            logger.exception("raised by a method")
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


async def test_a_large_request_is_decoded_beside_the_loop(monkeypatch) -> None:
    requests: list[object] = []

    async def inner(request: object, context: object) -> status_pb2.StopRunResponse:
        requests.append(request)
        return status_pb2.StopRunResponse()

    handler = await checked(inner)
    threads: list[object] = []
    monkeypatch.setattr(
        checked_calls,
        "decode",
        lambda kind, data: (
            threads.append(threading.current_thread()),
            kind.FromString(data),
        )[1],
    )
    hello = trainer_pb2.TrainerHello(layout_description="x" * (SMALL_BYTES + 1))
    for request in (hello, trainer_pb2.TrainerHello()):
        await handler.unary_unary(request.SerializeToString(), Context(is_gone=False))
    assert requests == [hello, trainer_pb2.TrainerHello()]
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_a_large_request_out_of_its_bounds_is_refused_as_a_small_one_is() -> None:
    async def inner(request: object, context: object) -> None:
        raise AssertionError("it was let in")

    handler = await checked(inner)
    context = Context(is_gone=False)
    hello = trainer_pb2.TrainerHello(places=[{"host_id": "x" * 300}] * 1000)
    with pytest.raises(grpc.aio.AbortError):
        await handler.unary_unary(hello.SerializeToString(), context)
    assert context.said == [
        "TrainerHello.places[0].host_id must have at most 256 bytes, got 300"
    ]


class Refusing(
    fleet_pb2_grpc.FleetServiceServicer, trainer_pb2_grpc.TrainerServiceServicer
):
    """Refuses every call, each in another way."""

    async def Register(self, request, context):  # noqa: N802
        raise ProtocolError("bad")

    async def Join(self, requests, context):  # noqa: N802
        async for _ in requests:
            await abort(context, grpc.StatusCode.NOT_FOUND, "no", Reason.BAD_ARGUMENT)
            yield fleet_pb2.ControllerMessage()

    async def ReportFailure(self, request, context):  # noqa: N802
        async with asyncio.TaskGroup() as tasks:
            await tasks.create_task(self.Register(request, context))


async def test_a_call_that_was_refused_is_forgotten_at_once() -> None:
    # A collection that finds thousands of them holds the loop: none is left for it to find.
    server = create_server(OPEN)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(Refusing(), server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def messages():
        yield fleet_pb2.ServerMessage(hello=fleet_pb2.ServerHello(server_id="a"))

    async def refused(channel, number: int) -> None:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        calls = (
            trainer.Register(trainer_pb2.TrainerHello()),
            trainer.Register(trainer_pb2.TrainerHello(world_size=2**31)),
            trainer.ReportFailure(trainer_pb2.TrainerFailure()),
            fleet.Join(messages()),
        )
        for call in calls[: 3 + number % 2]:
            assert await call.code() is not grpc.StatusCode.OK
        calls[-1].cancel()

    def kept() -> int:
        kinds = (grpc.aio.AbortError, ProtocolError, ExceptionGroup)
        return sum(issubclass(type(item), kinds) for item in gc.get_objects())

    async with open_channel(f"127.0.0.1:{port}", OPEN) as channel:
        await refused(channel, 1)
        gc.collect()
        before = kept()
        gc.disable()
        try:
            for number in range(20):
                await refused(channel, number)
            assert kept() < before + 5
        finally:
            gc.enable()
    await server.stop(0)
