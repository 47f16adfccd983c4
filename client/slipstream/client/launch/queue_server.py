"""Checks that a run's Redis answers and keeps data, and that the users of both ends may write."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from slipstream.client.launch.findings import Finding, advice, ok, problem
from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import QueueEnd
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.redis_connection import ROLES, RedisConnection, check_settings

# The checks report the warnings that the connection would log.
logging.getLogger("slipstream.protocol.queue.redis_connection").addHandler(logging.NullHandler())
LIMIT_S = 3.0
LINES = "docs/security.md has the ACL SETUSER line"


async def check_queue(config: Config) -> list[Finding]:
    """Checks that the user's own Redis or Valkey keeps data, and that both ends may write to it.

    Returns one finding for each end: the controller and the rollout servers. Call it only if
    `queue.redis_url` is set.
    """
    return [await _check_end(config, end) for end in ROLES]


async def ask_queue(config: Config, end: QueueEnd, *, patience_s: float) -> str:
    """Checks that the user of `end` may write to the queue; returns a line that names the user.

    Raises ConfigError if that user may not write, or if no server answers within `patience_s`.
    """
    url = redis_url_of(config.queue, end)
    connection = RedisConnection(url, "probe", reconnect_timeout_s=patience_s)
    try:
        async with contextlib.aclosing(connection.client):
            await connection.probe(ROLES[end].probe)
    except QueueError as error:
        raise ConfigError(f"{error}; check queue.redis_url too") from None
    return f"redis at {connection.name} lets user {connection.user} write"


async def _check_end(config: Config, end: QueueEnd) -> Finding:
    area, own = f"queue, {end.replace('_', ' ')}", config.queue.user_of(end)
    if own is not None and not own.password_file.exists():
        # A host has only the passwords of its own role.
        return advice(
            area,
            f"{own.password_file} is not here: user {own.user} was not tried",
            f"nothing, unless a {end.replace('_', ' ')} starts here",
        )
    try:
        async with asyncio.timeout(LIMIT_S):
            seen = await ask_queue(config, end, patience_s=0.0)
            if end == "controller":
                connection = RedisConnection(redis_url_of(config.queue, end), "probe")
                async with contextlib.aclosing(connection.client):
                    await check_settings(connection)
    except TimeoutError:
        return problem(area, f"redis does not answer within {LIMIT_S:g} s", LINES)
    except (QueueError, ConfigError) as error:
        return problem(area, str(error), LINES)
    return ok(area, seen)
