"""Compares this host with those that it will meet: the controller and the queue.

Waits for: a controller and a queue that others start. Unblocked by: their answers, or the scene's
time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc
import grpc.aio
from slipstream.client.launch.findings import Finding, Scene, ok
from slipstream.client.launch.placement import QUEUE_ENDS
from slipstream.client.launch.preflight import told_when_slow
from slipstream.core.errors import ConfigError, QueueError
from slipstream.protocol.access.security import (
    Credentials,
    call_metadata,
    open_channel,
    redis_url_of,
)
from slipstream.protocol.setup import Answer, differences, holds_mark
from slipstream.v1 import status_pb2, status_pb2_grpc

RETRY_S = 0.2
# Status codes after which the controller may still come.
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Parts of gRPC's texts about a refused certificate, which a retry would not change.
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
# Seconds in which a file of another host must appear: network file systems cache for a while that
# there was none.
SHOW_LIMIT_S = 5.0

# The checks report the warnings that the connection would log.
logging.getLogger("slipstream.extensions.redis.connection").addHandler(logging.NullHandler())


async def check_setup(scene: Scene) -> str | None:
    """Waits for a controller and compares its setup; ranks that save must share its folder."""
    if "controller" in scene.parts:
        return None
    config, limit_s, of_ranks = scene.config, scene.connect_timeout_s, "learner" in scene.parts
    address = config.controller.address
    with told_when_slow(f"waiting for the controller at {address}, for up to {limit_s:g} s"):
        answer = await ask_controller(address, Credentials.load(config.security), limit_s)
    for difference in differences(answer, config, of_ranks=of_ranks):
        raise ConfigError(difference)
    deadline_s = time.monotonic() + SHOW_LIMIT_S
    shares = of_ranks and config.checkpoint.every_steps
    while shares and not holds_mark(config, answer.setup):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"run.dir must be a folder that all nodes of the learner share, but here "
                f"{config.run.dir / answer.setup.mark} is not that of run {answer.setup.run_id}: "
                "mount it, or save no checkpoints (checkpoint.every_steps = 0)"
            )
        await asyncio.sleep(RETRY_S)
    # The largest difference that the times of the call allow.
    apart_s = max(abs(t - answer.setup.unix_time_s) for t in (answer.asked_s, answer.answered_s))
    same = "same versions and settings"
    return f"{address} answers: {same}, clocks differ by {apart_s:.2f} s at most"


async def running_id(scene: Scene) -> str:
    """Returns the run's id from its controller; raises ConfigError as `ask_controller` does."""
    config = scene.config
    credentials = Credentials.load(config.security)
    answer = await ask_controller(
        config.controller.address, credentials, scene.connect_timeout_s, run_id=config.run.id
    )
    return answer.setup.run_id


async def ask_controller(
    address: str,
    credentials: Credentials,
    limit_s: float,
    *,
    run_id: str | None = None,
) -> Answer:
    """Asks the controller for its setup; raises ConfigError if it refuses or is late."""
    cause = ""
    async with open_channel(address, credentials) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            asked_s = time.time()
            try:
                setup = await stub.GetSetup(
                    status_pb2.GetSetupRequest(),
                    timeout=left_s,
                    metadata=call_metadata(credentials, run_id),
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


async def check_queue(scene: Scene) -> list[Finding]:
    """Checks that the user's own Redis or Valkey lets the ends that start here write to it."""
    if scene.config.queue.kind != "redis":
        return []
    from slipstream.extensions.redis.connection import USERS, RedisConnection, check_settings

    found = []
    for end in (end for end in QUEUE_ENDS if end in scene.parts):
        url = redis_url_of(scene.config.queue, end)
        connection = RedisConnection(url, "probe", reconnect_timeout_s=scene.connect_timeout_s)
        try:
            async with contextlib.aclosing(connection.client):
                await connection.probe(USERS[end].probe)
                if end == "controller":
                    await check_settings(connection)
        except QueueError as error:
            raise ConfigError(f"{error}; check queue.redis_url too") from None
        found.append(ok(f"redis at {connection.name} lets user {connection.user} write"))
    return found
