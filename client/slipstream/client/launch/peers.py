"""The comparison with the controller's host, before an instance on another host loads anything."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import grpc.aio
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
from slipstream.protocol.setup import Answer, differences, holds_mark
from slipstream.v1 import status_pb2, status_pb2_grpc

RETRY_S = 0.2
# Status codes after which the controller may still come.
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Parts of gRPC's texts about a certificate that is not taken: it will not get better.
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
# Seconds in which a file of another host must show: network file systems remember for a while that
# there was none.
SHOW_LIMIT_S = 5.0
GOODBYE_S = 5.0


async def ask_controller(
    address: str, credentials: Credentials, limit_s: float, *, asker: str = ""
) -> Answer:
    """Waits for the controller; raises ConfigError if it refuses us or does not answer in time."""
    cause = ""
    async with open_channel(address, credentials) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            asked_s = time.time()
            try:
                setup = await stub.GetSetup(
                    status_pb2.GetSetupRequest(asker=asker),
                    timeout=left_s,
                    metadata=call_metadata(credentials),
                )
            except grpc.aio.AioRpcError as error:
                cause = " ".join((error.details() or error.code().name).split())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    cause = "what answers is no controller of this version"
                if error.code() not in AWAY or any(map(cause.__contains__, UNTRUSTED)):
                    raise ConfigError(f"the controller at {address}: {cause}") from None
            else:
                return Answer(setup, asked_s, time.time())
            await asyncio.sleep(min(RETRY_S, left_s))
    raise ConfigError(
        f"no controller answers at {address} within {limit_s:g} s: {cause}; start the learner, and "
        "let no firewall stand between"
    )


async def compare(
    config: Config,
    limit_s: float,
    *,
    of_ranks: bool,
    asker: str = "",
    is_awaited: bool = False,
) -> str:
    """Compares this host with the controller's; raises ConfigError for the first difference.

    A node of the learner must have all that ranks share: for checkpoints, the run's folder too.
    `is_awaited`: the controller keeps answering until this host has compared everything.
    """
    address = config.controller.address
    credentials = Credentials.load(config.security)
    answer = await ask_controller(address, credentials, limit_s, asker=asker)
    try:
        for difference in differences(answer, config, of_ranks=of_ranks):
            raise ConfigError(difference)
        if of_ranks and config.checkpoint.every_steps:
            await _check_shared(config, answer.setup)
    finally:
        if is_awaited:
            await _tell_end(address, credentials, asker)
    return f"{address} answers: same versions and settings, clocks differ by {_near(answer)}"


async def _tell_end(address: str, credentials: Credentials, asker: str) -> None:
    """Says that nothing more is asked; whoever is gone by now need not know."""
    request = status_pb2.GetSetupRequest(asker=asker, has_compared=True)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async with open_channel(address, credentials) as channel:
            await status_pb2_grpc.StatusServiceStub(channel).GetSetup(
                request, timeout=GOODBYE_S, metadata=call_metadata(credentials)
            )


def _near(answer: Answer) -> str:
    """Returns the largest difference of the clocks that the answer allows."""
    least, most = sorted(
        (answer.asked_s - answer.setup.unix_time_s, answer.answered_s - answer.setup.unix_time_s)
    )
    return f"{max(abs(least), abs(most)):.2f} s at most"


async def _check_shared(config: Config, setup: status_pb2.Setup) -> None:
    deadline_s = time.monotonic() + SHOW_LIMIT_S
    while not holds_mark(config, setup):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"run.dir must be a folder that all nodes of the learner share, but here "
                f"{config.run.dir / setup.mark} is not that of run {setup.run_id}: mount it, or "
                "save no checkpoints (checkpoint.every_steps = 0)"
            )
        await asyncio.sleep(RETRY_S)
