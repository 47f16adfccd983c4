"""One Redis server as the queue of one run.

Its keys, how durable it is, and what to do when it is away.

Nothing is retried inside the client library: a repeated XADD would be a second entry, so repeats
are made here, and recognised by the receiver.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
    WatchError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from slipstream.protocol.errors import QueueError

RECONNECT_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
# What redis-py raises when the server is not there.
CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, WatchError, OSError)
# Fields of an entry.
ID, DATA = b"id", b"data"
REFUSALS = (AuthenticationError, AuthorizationError)

# What the server, or the client library around it, says of a command without rights.
REFUSED_COMMAND = re.compile(r"run the '([^']+)' command")
COMMAND_OF_PIPELINE = re.compile(r"Command # \d+ \((\w+)")

REQUIRED_SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
}

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RedisConnection:
    """A Redis server, the keys of one run on it, and the proof that it is still the same data."""

    def __init__(self, url: str, run_id: str) -> None:
        self.name = _without_password(url)
        self._run_id = run_id
        prefix = f"slipstream:{run_id}"
        self.stream = f"{prefix}:trajectories"
        self.mark_key = f"{prefix}:mark"
        # Drawn by the controller; another or none later means that the data are gone.
        self.mark: str | None = None
        # Why the last call failed, until one succeeds.
        self.trouble: str | None = None
        try:
            self.client = redis.asyncio.Redis.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                # redis-py keeps this limit by asyncio.wait_for, which Python 3.11 lets swallow a
                # cancellation. `once` has one of its own.
                socket_timeout=None,
                socket_connect_timeout=CALL_TIMEOUT_S,
                protocol=2,
            )
        except ValueError as error:
            raise QueueError(f"queue.redis_url {self.name}: {error}") from error
        self.user = str(self.client.connection_pool.connection_kwargs.get("username") or "default")

    @property
    def added_key(self) -> str:
        """Bytes that were ever added, by all senders; belongs to the mark."""
        return f"{self.mark_key}:{self.mark}:added"

    @property
    def removed_key(self) -> str:
        """Bytes that were ever acknowledged; belongs to the mark."""
        return f"{self.mark_key}:{self.mark}:removed"

    async def open(self, *steps: Callable[[], Awaitable[None]]) -> None:
        """Takes the steps one after another, each as `persistently`; closes when one fails."""
        try:
            for step in steps:
                await self.persistently(step)
        except BaseException:
            await self.client.aclose()
            raise

    async def once(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """`call`, or TimeoutError after 10 s."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call()

    async def persistently(
        self,
        call: Callable[[], Awaitable[Result]],
    ) -> Result:
        """`call`, again after a lost connection for 30 s; QueueError names the server."""
        backoff_s = FIRST_BACKOFF_S
        deadline = asyncio.get_running_loop().time() + RECONNECT_TIMEOUT_S
        while True:
            try:
                result = await self.once(call)
            except CONNECTION_ERRORS as error:
                if isinstance(error, REFUSALS) or isinstance(error.__cause__, REFUSALS):
                    raise self.failure(error) from error
                if asyncio.get_running_loop().time() + backoff_s > deadline:
                    raise QueueError(
                        f"redis at {self.name} does not answer within "
                        f"{RECONNECT_TIMEOUT_S:g} s: {error}"
                    ) from error
                if self.trouble is None:
                    logger.warning("redis at %s was lost: %s", self.name, error)
                self.trouble = str(error)
            except RedisError as error:
                raise self.failure(error) from error
            else:
                if self.trouble is not None:
                    logger.warning("redis at %s answers again", self.name)
                self.trouble = None
                return result
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def read_used(self, reader: redis.asyncio.Redis | None = None) -> int:
        """Bytes that wait; QueueError when the server lost the data."""
        mark, added, removed = await (reader or self.client).mget(
            self.mark_key, self.added_key, self.removed_key
        )
        self.check_mark(mark)
        return int(added or 0) - int(removed or 0)

    def check_mark(self, found: bytes | str | None) -> None:
        """QueueError when the server lost the data of this run."""
        if found is None or _text(found) != self.mark:
            what = "came back empty" if found is None else "holds the data of another start"
            raise QueueError(
                f"redis at {self.name} {what}: what waited there is lost; "
                "was it restarted without its append-only file?"
            )

    def failure(self, error: BaseException) -> QueueError:
        """One line with server and user, for rights that are missing with the command."""
        if isinstance(error.__cause__, REFUSALS):
            error = error.__cause__
        if isinstance(error, NoPermissionError):
            text = str(error)
            found = REFUSED_COMMAND.search(text) or COMMAND_OF_PIPELINE.search(text)
            # The rest of a pipeline's message holds what was sent.
            lacks = (
                f"lacks the right to {found[1].lower()} on the keys of run {self._run_id}"
                if found is not None
                else f"lacks a right on the keys of run {self._run_id}"
            )
            return QueueError(
                f"redis at {self.name}: user {self.user} {lacks}; "
                "`slipstream doctor` names all that are missing"
            )
        if isinstance(error, REFUSALS):
            return QueueError(f"redis at {self.name}: user {self.user}: {error}")
        return QueueError(f"redis at {self.name}: {error}")

    async def check_settings(self) -> None:
        """QueueError when the server may lose what it has acknowledged."""
        try:
            found = await self.client.config_get(*REQUIRED_SETTINGS)
        except (NoPermissionError, ResponseError) as error:
            logger.warning(
                "redis at %s does not show its settings (%s): appendfsync always and "
                "maxmemory-policy noeviction are needed, or trajectories may be lost",
                self.name,
                error,
            )
            return
        settings = {_text(key): _text(value) for key, value in found.items()}
        for setting, needed in REQUIRED_SETTINGS.items():
            value = settings.get(setting)
            if value != needed:
                raise QueueError(
                    f"redis at {self.name}: {setting} must be {needed} so that nothing is lost, "
                    f"got {value}"
                )

    async def draw_mark(self) -> None:
        """Marks the data of the run, unless they are; QueueError when they are others."""
        await self.client.set(self.mark_key, secrets.token_hex(8), nx=True)
        await self.find_mark()

    async def find_mark(self) -> None:
        """Remembers the mark; QueueError when there is none, or another than before."""
        found = await self.client.get(self.mark_key)
        if self.mark is None:
            if found is None:
                raise QueueError(
                    f"redis at {self.name} does not know run {self._run_id}: the controller opens "
                    "its queue first; was it emptied since, or is it another server?"
                )
            self.mark = _text(found)
        self.check_mark(found)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"
