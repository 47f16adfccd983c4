"""Checks the Redis of a configuration: it answers, keeps data, and its users have their rights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import NoPermissionError, RedisError, ResponseError
from slipstream.client.launch.checks import Finding, advice, ok, problem
from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.settings.config import Config
from slipstream.core.settings.queue_section import QueueEnd
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.redis_connection import RedisConnection
from slipstream.protocol.queue.redis_durability import (
    check_loading,
    check_settings,
    server_version,
)
from slipstream.protocol.queue.redis_rights import (
    CONTROLLER,
    ROLES,
    Command,
    QueueRole,
    right_of,
)

LIMIT_S = 3.0
LINES = "docs/security.md has the ACL SETUSER line"


@dataclass(frozen=True)
class Examination:
    """The result for one user; rights are written by `right_of`."""

    # Kind and version of the server.
    server: str
    user: str
    missing: tuple[str, ...]
    excessive: tuple[str, ...]


async def check_queue(config: Config) -> list[Finding]:
    """Returns one finding for each end of a queue that is the user's own Redis or Valkey."""
    return [await _check_end(config, end) for end in ROLES]


async def _check_end(config: Config, end: QueueEnd) -> Finding:
    area, role, own = f"queue, {end.replace('_', ' ')}", ROLES[end], config.queue.user_of(end)
    if own is not None and not own.password_file.exists():
        # A host has the passwords of its own role only.
        return advice(
            area,
            f"{own.password_file} is not here: user {own.user} was not tried",
            f"nothing, unless a {end.replace('_', ' ')} starts here",
        )
    try:
        found = await examine(redis_url_of(config.queue, end), role, limit_s=LIMIT_S)
    except (QueueError, ConfigError) as error:
        return problem(area, str(error), f"check queue.redis_url and the server; {LINES}")
    if found.missing:
        return problem(area, f"user {found.user} may not {', '.join(found.missing)}", LINES)
    if found.excessive:
        return advice(
            area,
            f"user {found.user} has more rights than it needs: {', '.join(found.excessive)}",
            LINES,
        )
    return ok(area, f"{found.server}, user {found.user} has only the rights it needs")


async def examine(url: str, role: QueueRole, *, limit_s: float) -> Examination:
    """Logs in as the user of `url`; raises QueueError if the server cannot hold a queue.

    Nothing is written: rights are tried inside a transaction that is discarded.
    """
    connection = RedisConnection(url, "examination")
    try:
        async with asyncio.timeout(limit_s):
            kind, version = await server_version(connection.client)
            if role is CONTROLLER:
                await check_settings(connection)
            missing = [
                command
                for command, allowed in await _try_rights(connection, role.needed)
                if not allowed
            ]
            excessive = [
                command
                for command, allowed in await _try_rights(connection, role.forbidden)
                if allowed
            ]
            if role is CONTROLLER and not missing:
                await check_loading(connection)
    except TimeoutError:
        raise QueueError(
            f"redis at {connection.name} does not answer within {limit_s:g} s"
        ) from None
    except (RedisError, OSError) as error:
        raise connection.failure(error) from error
    finally:
        await connection.client.aclose()
    return Examination(
        f"{kind} {version}",
        connection.user,
        tuple(map(right_of, missing)),
        tuple(map(right_of, excessive)),
    )


async def _try_rights(
    connection: RedisConnection, commands: Sequence[Command]
) -> list[tuple[Command, bool]]:
    """Tries each command in a transaction: the server checks rights when it queues a command."""
    pool = connection.client.connection_pool
    line = await pool.get_connection()  # type: ignore[no-untyped-call]
    is_open = False
    try:
        tried: list[tuple[Command, bool]] = []
        # WATCH is the only command that is not allowed in a transaction.
        for command in sorted(commands, key=lambda command: command[0] != "WATCH"):
            if command[0] != "WATCH" and not is_open:
                await line.send_command("MULTI")
                await line.read_response()
                is_open = True
            await line.send_command(*command)
            try:
                await line.read_response()
            except NoPermissionError:
                tried.append((command, False))
            except ResponseError as error:
                # An older server does not know the command; it counts as not allowed.
                if "unknown" not in str(error).lower():
                    raise
                tried.append((command, False))
            else:
                tried.append((command, True))
    finally:
        # This ends the transaction in every case.
        await line.disconnect()
        await pool.release(line)
    return tried
