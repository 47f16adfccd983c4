"""The check of a Redis by `slipstream doctor`: does it answer, is it durable, users' rights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import NoPermissionError, RedisError, ResponseError
from slipstream.core.errors import QueueError
from slipstream.protocol.queue.redis_connection import RedisConnection
from slipstream.protocol.queue.redis_durability import (
    check_loading,
    check_settings,
    server_version,
)
from slipstream.protocol.queue.redis_rights import CONTROLLER, Command, QueueRole, right_of


@dataclass(frozen=True)
class Examination:
    """The result for one user; rights are written by `right_of`."""

    # Kind and version of the server.
    server: str
    user: str
    missing: tuple[str, ...]
    excessive: tuple[str, ...]


async def examine(url: str, role: QueueRole, *, limit_s: float) -> Examination:
    """Logs in as the user of `url`; QueueError when the server cannot hold a queue.

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
