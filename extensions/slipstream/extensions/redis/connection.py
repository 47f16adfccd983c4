"""Connects to the Redis server that holds a run's queue: keys, users and retries.

The client library must not retry: a repeated XADD would make a second entry. This module retries
instead, and the receiver recognises repeated entries.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    WatchError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from slipstream.core.backoff import Backoff
from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.patience import Patience
from slipstream.core.settings.sections import QueueEnd

REQUIRED_SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    # With "yes" nothing is synced while the append-only file is rewritten.
    "no-appendfsync-on-rewrite": "no",
}
CALL_TIMEOUT_S = 10.0
CLEANUP_S = 1.0
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
# Errors of redis-py when the server has become a replica: its name may lead to the new primary.
DEMOTIONS = (ReadOnlyError, MasterDownError)
# Errors of a replica, and those when the server does not answer.
CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, WatchError, OSError, *DEMOTIONS)
# The only field of a stream entry: a DeliverRequest, as servers send it over gRPC.
DELIVERY = b"delivery"
REFUSALS = (AuthenticationError, AuthorizationError, ssl.SSLCertVerificationError)

# Patterns of the server's and the client library's messages about a command; the latter's hold its
# data, too.
REFUSED_COMMAND = re.compile(r"run the '([^']+)' command")
COMMAND_OF_PIPELINE = re.compile(
    r"""Command # \d+ \((\w+).*\) of pipeline caused error: (?:\(["'](.*)["'],\)|(.*))""", re.DOTALL
)
ON_LOSS = "start the run again: it generates lost trajectories again"

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RedisConnection:
    """A connection to Redis, with the keys of one run."""

    # Seconds for which a lost connection is retried.
    reconnect_timeout_s = 30.0

    def __init__(self, url: str, run_id: str, patience_s: float | None = None) -> None:
        """Retries a lost connection for `patience_s`; raises QueueError if `url` is invalid."""
        if patience_s is not None:
            self.reconnect_timeout_s = patience_s
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
        # The URL without user and password.
        self.name = f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
        self._run_id = run_id
        self.stream = f"slipstream:{run_id}:trajectories"
        # Number of bytes of all entries in the stream: senders wait while it is too large.
        self.bytes_key = f"slipstream:{run_id}:bytes"
        # The last call's error; None after a success.
        self.trouble: str | None = None
        try:
            self.client = redis.asyncio.Redis.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                # redis-py keeps this limit by asyncio.wait_for, which may swallow a cancellation in
                # Python 3.11. `once` has its own limit.
                socket_timeout=None,
                socket_connect_timeout=CALL_TIMEOUT_S,
                # Redis 7.0 has neither CLIENT SETINFO nor a right to it.
                driver_info=None,
                protocol=2,
            )
        except ValueError as error:
            raise QueueError(f"queue.redis_url {self.name}: {error}") from error
        self.user = str(self.client.connection_pool.connection_kwargs.get("username") or "default")

    async def once(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Runs `call`. Raises TimeoutError after 10 s, or 11 s if redis-py still cleans up then."""
        limit_s = CALL_TIMEOUT_S
        try:
            # A cancelled transaction sends UNWATCH, for whose answer redis-py knows no limit.
            async with asyncio.timeout(limit_s + CLEANUP_S), asyncio.timeout(limit_s):
                return await call()
        except DEMOTIONS:
            await self.client.connection_pool.disconnect(inuse_connections=False)
            raise
        except TimeoutError:
            raise TimeoutError(f"a call had no answer for {limit_s:g} s") from None

    async def persistently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Runs `call`; repeats it for `reconnect_timeout_s` while the server is unreachable.

        Seconds in which this process stood still do not count.
        Raises QueueError when the server stays unreachable or answers with an error, and
        ConfigError when the server refuses the user, or its certificate is not trusted.
        """
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        patience = Patience(self.reconnect_timeout_s)
        while True:
            patience.begin(CALL_TIMEOUT_S + CLEANUP_S + MAX_BACKOFF_S)
            try:
                result = await self.once(call)
            except CONNECTION_ERRORS as error:
                if _refusal(error) is not None:
                    raise self.failure(error) from error
                cause = _said(error)
                if patience.left_s < backoff.next_s:
                    raise self.away(self.reconnect_timeout_s, cause) from error
                if self.trouble is None:
                    logger.warning("redis at %s was lost: %s", self.name, cause)
                self.trouble = cause
            except RedisError as error:
                raise self.failure(error) from error
            else:
                if self.trouble is not None:
                    logger.warning("redis at %s answers again", self.name)
                self.trouble = None
                return result
            await asyncio.sleep(backoff.take_s())

    @property
    def inspection(self) -> tuple[str | int, ...]:
        """The command for Redis's own counts of the stream; it shows one entry as well."""
        return "XINFO", "STREAM", self.stream, "FULL", "COUNT", 1

    def used_bytes(self, stored: bytes | str | None) -> int:
        """Returns the bytes that wait, of `bytes_key`; raises QueueError if it has no number."""
        if stored is None:
            raise QueueError(
                f"redis at {self.name} does not know run {self._run_id}: the controller opens its "
                "queue first; was it emptied since, or is it another server?"
            )
        try:
            return int(stored)
        except ValueError:
            raise QueueError(
                f"redis at {self.name}: {self.bytes_key} holds {stored[:40]!r}, which is no number "
                "of bytes; delete this key, and start the run again"
            ) from None

    def lost(self, what: str) -> QueueError:
        """Returns a one-line error for lost data, with the evidence `what` and the remedy."""
        return QueueError(
            f"redis at {self.name} lost data of run {self._run_id}: {what}; {ON_LOSS}"
        )

    def away(self, limit_s: float, cause: str) -> QueueError:
        """Returns a one-line error for a server that gave no answer for `limit_s` seconds."""
        return QueueError(
            f"redis at {self.name} does not answer within {limit_s:g} s: {cause}; its own log says "
            "more: it ends, for example, when its disk is full"
        )

    def failure(self, error: BaseException) -> QueueError | ConfigError:
        """Returns a one-line error for a call that failed with `error`.

        The error names the server, and if Redis refused the user, the user and the refused command.
        A refusal is a ConfigError, because a retry would be refused again; other errors are a
        QueueError.
        """
        error = _refusal(error) or error
        if isinstance(error, NoPermissionError):
            text = str(error)
            match = REFUSED_COMMAND.search(text) or COMMAND_OF_PIPELINE.search(text)
            what = "a right" if match is None else f"the right to {match[1].lower()}"
            return ConfigError(
                f"redis at {self.name}: user {self.user} lacks {what} on the keys of run "
                f"{self._run_id}; docs/security.md has the lines that give all rights"
            )
        if isinstance(error, REFUSALS):
            return ConfigError(f"redis at {self.name}: user {self.user}: {error}")
        if isinstance(error, AskError):
            node = _said(error).rpartition(" ")[2]
            what = f"is part of a cluster, which keeps keys of run {self._run_id} at {node}"
            return ConfigError(f"redis at {self.name} {what}: the queue needs one server for all")
        return QueueError(f"redis at {self.name}: {_said(error)}")


def _said(error: BaseException) -> str:
    """Returns the text of an error, without the command of a pipeline that had it."""
    return COMMAND_OF_PIPELINE.sub(r"\2\3", str(error))


def _refusal(error: BaseException) -> BaseException | None:
    """Returns the error on user or certificate that redis-py wrapped in `error`, or None."""
    wrapped = (error, error.__cause__, error.__context__)
    return next((candidate for candidate in wrapped if isinstance(candidate, REFUSALS)), None)


async def check_settings(connection: RedisConnection) -> None:
    """Raises QueueError if the server may lose acknowledged writes; warns if it hides settings."""
    try:
        settings = await connection.client.config_get(*REQUIRED_SETTINGS)
    except (NoPermissionError, ResponseError) as error:
        needed = ", ".join(f"{key} {value}" for key, value in REQUIRED_SETTINGS.items())
        logger.warning(
            "redis at %s does not show its settings (%s): %s are needed, or trajectories may "
            "be lost",
            connection.name,
            error,
            needed,
        )
        return
    for setting, needed in REQUIRED_SETTINGS.items():
        if settings.get(setting) != needed:
            raise QueueError(
                f"redis at {connection.name}: {setting} must be {needed} so that nothing is lost, "
                f"got {settings.get(setting)}"
            )


# The stream of a run that does not exist.
_PROBED = "slipstream:probe:trajectories"
# A command that writes with the rights of each end, and changes nothing where no stream is.
PROBES: Mapping[QueueEnd, Sequence[str]] = {
    "controller": ("XDEL", _PROBED, "0-1"),
    "rollout_server": ("XADD", _PROBED, "NOMKSTREAM", "*", "id", ""),
}
