import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from slipstream.protocol.access.security import (
    Credentials,
    bind,
    create_server,
    open_channel,
)
from slipstream.protocol.rich_errors import Reason, abort
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import environment_pb2_grpc
from support.rigs.waiting import LIMIT_S

OPEN = Credentials()


class Gone:
    """The context of a call whose caller went before the status could be sent."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


class Refusing(environment_pb2_grpc.EnvironmentServiceServicer):
    """Refuses each client, after it has gone."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def ServeEpisodes(  # noqa: N802
        self,
        requests: AsyncIterator[pb.WorkerMessage],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.WorkerCommand]:
        try:
            await abort(
                Gone(), grpc.StatusCode.FAILED_PRECONDITION, "no", Reason.WRONG_STATE
            )  # type: ignore[arg-type]
            yield pb.WorkerCommand()
        finally:
            self.ended.set()


async def test_a_refusal_of_a_caller_that_has_gone_cancels_the_call_without_a_traceback(
    caplog,
):
    refusing = Refusing()
    server = create_server(OPEN)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(refusing, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', OPEN)}"
    await server.start()
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(LIMIT_S), open_channel(address, OPEN) as channel:
            call = environment_pb2_grpc.EnvironmentServiceStub(channel).ServeEpisodes()
            await refusing.ended.wait()
            call.cancel()
        await server.stop(None)
    assert not caplog.records
