"""Calls between two releases: an upgrade replaces files under a run that goes on."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

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
from slipstream.protocol.access.tokens import OF_ANY_RELEASE, is_bound
from slipstream.protocol.release import RELEASE, RELEASE_KEY, source_digest
from slipstream.protocol.rich_errors import Reason, has_reason
from slipstream.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    fleet_pb2,
    operations_pb2,
    status_pb2,
    status_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    trajectory_pb2,
)
from support.rigs.waiting import LIMIT_S

OPEN = Credentials()


class Parts(
    status_pb2_grpc.StatusServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    environment_pb2_grpc.WorkerServiceServicer,
    environment_pb2_grpc.EnvironmentServiceServicer,
):
    def __init__(self) -> None:
        self.called: list[str] = []

    async def StopRun(self, request, context):  # noqa: N802
        self.called.append("StopRun")
        return status_pb2.StopRunResponse()

    async def Register(self, request, context):  # noqa: N802
        self.called.append("Register")
        return trainer_pb2.TrainerWelcome()

    async def SubmitEnvironment(self, request, context):  # noqa: N802
        self.called.append("SubmitEnvironment")
        return environment_pb2.SubmitEnvironmentResponse()

    async def Attach(self, requests, context):  # noqa: N802
        self.called.append("Attach")
        yield environment_pb2.WorkerCommand()


async def served(parts: Parts, run_id: str | None) -> AsyncIterator[grpc.aio.Channel]:
    server = create_server(OPEN, run_id=run_id)
    status_pb2_grpc.add_StatusServiceServicer_to_server(parts, server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(parts, server)
    environment_pb2_grpc.add_WorkerServiceServicer_to_server(parts, server)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(parts, server)
    port = bind(server, "127.0.0.1:0", OPEN)
    await server.start()
    try:
        opened = open_channel(f"127.0.0.1:{port}", OPEN)
        async with asyncio.timeout(LIMIT_S), opened as channel:
            yield channel
    finally:
        await server.stop(None)


def of_release(release: str | None, run_id: str | None = None) -> list[tuple[str, str]]:
    metadata = [pair for pair in call_metadata(OPEN, run_id) if pair[0] != RELEASE_KEY]
    return metadata if release is None else [*metadata, (RELEASE_KEY, release)]


def test_who_upgrades_may_see_and_stop_a_run_and_nothing_else() -> None:
    modules = (
        environment_pb2,
        fleet_pb2,
        operations_pb2,
        status_pb2,
        trainer_pb2,
        trajectory_pb2,
    )
    services: list[ServiceDescriptor] = [
        service for m in modules for service in m.DESCRIPTOR.services_by_name.values()
    ]
    names = [f"/{s.full_name}/{m.name}" for s in services for m in s.methods]
    open_ones = {
        name.rpartition("/")[2] for name in names if not is_bound(name, OF_ANY_RELEASE)
    }
    reads = {"GetStatus", "GetSetup", "Watch", "ListEnvironments"}
    assert open_ones == reads | {"StopRun", "DrainServer"}
    assert not is_bound("/grpc.health.v1.Health/Check", OF_ANY_RELEASE)


@pytest.mark.parametrize("release", ["0.0.9 (protocol 01234567)", None])
async def test_a_trainer_of_another_release_is_refused_and_a_stop_is_not(
    release: str | None,
) -> None:
    parts = Parts()
    async for channel in served(parts, "r-1"):
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        status = status_pb2_grpc.StatusServiceStub(channel)
        other = of_release(release, "r-1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.Register(trainer_pb2.TrainerHello(), metadata=other)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert has_reason(caught.value, Reason.PROTOCOL)
        line = caught.value.details()
        assert (
            f"the run has slipstream-rl {RELEASE}, the caller {release or 'an older one'}: "
            in line
        )
        assert "stop the run, and the same command resumes it" in line
        await status.StopRun(
            status_pb2.StopRunRequest(reason="upgrade"), metadata=other
        )
        assert parts.called == ["StopRun"]
        await trainer.Register(
            trainer_pb2.TrainerHello(), metadata=of_release(RELEASE, "r-1")
        )
        assert parts.called == ["StopRun", "Register"]


async def test_a_program_of_ones_own_has_no_release_and_a_client_of_another_is_refused() -> (
    None
):
    parts = Parts()
    async for channel in served(parts, "r-1"):
        submit = environment_pb2_grpc.EnvironmentServiceStub(channel).SubmitEnvironment
        request = environment_pb2.SubmitEnvironmentRequest()
        with pytest.raises(grpc.aio.AioRpcError, match="the caller 9.0"):
            await submit(request, metadata=of_release("9.0", "r-1"))
        assert parts.called == []
        await submit(request, metadata=of_release(None, "r-1"))
        assert parts.called == ["SubmitEnvironment"]


async def test_a_worker_that_an_upgrade_replaced_is_refused_by_its_server() -> None:
    parts = Parts()
    async for channel in served(parts, None):
        workers = environment_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=r"the caller 9\.0"):
            await workers.Attach(iter(()), metadata=of_release("9.0")).read()
        assert parts.called == []
        assert await workers.Attach(iter(()), metadata=of_release(RELEASE)).read()
        # The worker's interpreter lacks our package, or has another version; the source is the
        # server's.
        elsewhere = f"unknown {RELEASE.partition(' ')[2]}"
        assert await workers.Attach(iter(()), metadata=of_release(elsewhere)).read()
    async for channel in served(parts, "r-1"):
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="the caller unknown"):
            await trainer.Register(
                trainer_pb2.TrainerHello(), metadata=of_release(elsewhere, "r-1")
            )


def test_clones_of_one_version_with_other_messages_are_other_releases(
    tmp_path: Path,
) -> None:
    ours = Path(status_pb2.__file__).parents[1]
    for name in ("v1", "protocol"):
        shutil.copytree(ours / name, tmp_path / name)
    digest = source_digest(tmp_path)
    assert RELEASE.endswith(f" (protocol {digest})")
    for changed in ("v1/status_pb2.py", "protocol/access/tokens.py"):
        with (tmp_path / changed).open("a") as file:
            file.write("# another line\n")
        assert source_digest(tmp_path) != digest
        digest = source_digest(tmp_path)
