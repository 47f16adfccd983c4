"""Calls that name their run, and calls of others."""

import asyncio

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from slipstream.protocol.access.security import (
    Credentials,
    bind,
    call_metadata,
    create_server,
    open_channel,
)
from slipstream.protocol.access.tokens import NAMELESS, is_bound
from slipstream.protocol.rich_errors import Reason, has_reason
from slipstream.v1 import (
    environment_pb2,
    fleet_pb2,
    status_pb2,
    status_pb2_grpc,
    trainer_pb2,
    trajectory_pb2,
)
from support.rigs.waiting import LIMIT_S

OPEN = Credentials()
TOKEN = Credentials(token="t" * 40)


class Stoppable(status_pb2_grpc.StatusServiceServicer):
    def __init__(self) -> None:
        self.stopped: list[str] = []

    async def StopRun(self, request, context):  # noqa: N802
        self.stopped.append(request.reason)
        return status_pb2.StopRunResponse()

    async def GetStatus(self, request, context):  # noqa: N802
        return status_pb2.RunStatus(run_id="ours-1")

    async def Watch(self, request, context):  # noqa: N802
        yield status_pb2.Event(number=1)


def services() -> list[ServiceDescriptor]:
    modules = (environment_pb2, fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2)
    return [
        service for m in modules for service in m.DESCRIPTOR.services_by_name.values()
    ]


def test_only_calls_that_tell_which_run_it_is_need_not_name_it() -> None:
    names = [
        f"/{m.containing_service.full_name}/{m.name}"
        for s in services()
        for m in s.methods
    ]
    open_ones = {
        name.rpartition("/")[2] for name in names if not is_bound(name, NAMELESS)
    }
    assert open_ones == {"GetStatus", "GetSetup", "Watch", "ListEnvironments"}
    assert not is_bound("/grpc.health.v1.Health/Check", NAMELESS)


@pytest.mark.parametrize("credentials", [OPEN, TOKEN], ids=["open", "token"])
async def test_a_call_reaches_the_run_that_it_names_alone(
    credentials: Credentials,
) -> None:
    controller = Stoppable()
    server = create_server(credentials, run_id="ours-1")
    status_pb2_grpc.add_StatusServiceServicer_to_server(controller, server)
    port = bind(server, "127.0.0.1:0", credentials)
    await server.start()
    refusals = {
        "theirs-2": "this is the controller of another run than theirs-2",
        None: "a call names its run in slipstream-run",
    }
    try:
        opened = open_channel(f"127.0.0.1:{port}", credentials)
        async with asyncio.timeout(LIMIT_S), opened as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            for run_named, line in refusals.items():
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.StopRun(
                        status_pb2.StopRunRequest(reason="not mine", failed=True),
                        metadata=call_metadata(credentials, run_named),
                    )
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert caught.value.details() == line
                assert has_reason(caught.value, Reason.OTHER_RUN)
            for run_named in (None, "ours-1"):
                metadata = call_metadata(credentials, run_named)
                status = await stub.GetStatus(
                    status_pb2.GetStatusRequest(), metadata=metadata
                )
                assert status.run_id == "ours-1"
                events = stub.Watch(status_pb2.WatchRequest(), metadata=metadata)
                assert [event.number async for event in events] == [1]
            their_metadata = call_metadata(credentials, "theirs-2")
            with pytest.raises(grpc.aio.AioRpcError, match="another run than theirs-2"):
                await stub.Watch(
                    status_pb2.WatchRequest(), metadata=their_metadata
                ).read()
            our_metadata = call_metadata(credentials, "ours-1")
            await stub.StopRun(
                status_pb2.StopRunRequest(reason="mine"), metadata=our_metadata
            )
    finally:
        await server.stop(None)
    assert controller.stopped == ["mine"]
