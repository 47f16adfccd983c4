"""Checks Redis or Valkey before a run, for each end of the queue that starts on this machine."""

import contextlib
import functools
import logging

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.placement import QUEUE_ENDS
from slipstream.client.launch.preflight import told_when_slow
from slipstream.client.launch.scene import CONTROLLER, SERVER, WHOLE_RUN, Finding, Scene, ok
from slipstream.core.errors import ConfigError, QueueError
from slipstream.extensions.redis.connection import PROBES, RedisConnection, check_settings
from slipstream.protocol.access.security import redis_url_of

ACL = "docs/security.md has the ACL SETUSER line"
# The checks report the warnings that the connection would log.
logging.getLogger(RedisConnection.__module__).addHandler(logging.NullHandler())


def check_queue_settings(scene: Scene) -> None:
    """Checks the queue's URL and passwords for the parts that start on this machine."""
    for end in QUEUE_ENDS:
        if end in scene.parts:
            redis_url_of(scene.config.queue, end)


async def check_queue(scene: Scene) -> list[Finding]:
    """Checks that the user's own Redis or Valkey lets the ends that start here write to it."""
    findings: list[Finding] = []
    limit_s = scene.connect_timeout_s
    for end in (end for end in QUEUE_ENDS if end in scene.parts):
        url = redis_url_of(scene.config.queue, end)
        connection = RedisConnection(url, "probe")
        connection.reconnect_timeout_s = limit_s
        probe = functools.partial(connection.client.execute_command, *PROBES[end])
        waiting = f"waiting for the queue.redis_url {connection.name}, for up to {limit_s:g} s"
        try:
            async with contextlib.aclosing(connection.client):
                with told_when_slow(waiting):
                    await connection.persistently(probe)
                if end == "controller":
                    await check_settings(connection)
        except QueueError as error:
            raise ConfigError(f"{error}; check queue.redis_url too") from None
        findings.append(ok(f"redis at {connection.name} lets user {connection.user} write"))
    return findings


CHECKS = (
    Check(
        "queue",
        Stage.SETTINGS,
        WHOLE_RUN,
        check_queue_settings,
        after="queue",
    ),
    Check(
        "queue server",
        Stage.START,
        CONTROLLER | SERVER,
        check_queue,
        ACL,
        after="setup",
    ),
)
