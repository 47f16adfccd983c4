"""The processes of one command, with a controller that only listens."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from slipstream.client.placement import Placement
from slipstream.client.session import Session
from slipstream.protocol.access.security import Credentials, bind, create_server
from slipstream.v1 import status_pb2, status_pb2_grpc
from small_configs import config_of

OPEN = Credentials(certificate=None, key=None, ca=None, token=None)


class Listening(status_pb2_grpc.StatusServiceServicer):
    """Keeps with which words the run was stopped."""

    def __init__(self) -> None:
        self.stopped: asyncio.Queue[status_pb2.StopRunRequest] = asyncio.Queue()

    async def StopRun(  # noqa: N802
        self, request: status_pb2.StopRunRequest, context: object
    ) -> status_pb2.StopRunResponse:
        self.stopped.put_nowait(request)
        return status_pb2.StopRunResponse()


async def test_a_server_for_which_the_machine_has_no_process_ends_the_run_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, grpc_server = Listening(), create_server(OPEN)
    status_pb2_grpc.add_StatusServiceServicer_to_server(controller, grpc_server)
    port = bind(grpc_server, "127.0.0.1:0", OPEN)
    await grpc_server.start()
    config = config_of(tmp_path)
    there = config.controller.model_copy(update={"address": f"127.0.0.1:{port}"})
    config = config.model_copy(update={"controller": there})
    try:
        async with Session(config, OPEN, Placement()) as session:
            monkeypatch.setattr(sys, "executable", "/missing/python")
            session.keep_rollout_server(0)
            async with asyncio.timeout(20):
                request = await controller.stopped.get()
    finally:
        await grpc_server.stop(None)
    cause = "rollout server server-0 cannot be started: No such file or directory"
    assert (request.reason, request.failed) == (cause, True)
