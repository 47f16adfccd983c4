"""A real controller that asks its callers for a token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from slipstream.learner.controller.application import Controller
from slipstream.protocol.access.security import Credentials, call_metadata
from slipstream.v1 import status_pb2, status_pb2_grpc

from support.rigs.controller_runs import make_config
from support.rigs.waiting import LIMIT_S

TOKEN = "t" * 40


def with_token(token: str | None) -> Credentials:
    return Credentials(token=token)


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[str]:
    config = make_config(tmp_path)
    controller = Controller(config, with_token(TOKEN))
    running = asyncio.ensure_future(controller.run())
    address = config.controller.address
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            await stub.GetStatus(
                status_pb2.GetStatusRequest(),
                metadata=call_metadata(with_token(TOKEN)),
                wait_for_ready=True,
                timeout=LIMIT_S,
            )
        yield address
    finally:
        controller.stop("the test is over")
        await asyncio.wait_for(running, LIMIT_S)
