"""Connects to the Redis server that holds a run's queue: keys, counters, users and retries.

The client library must not retry: a repeated XADD would make a second entry. This module retries
instead, and the receiver recognises repeated entries.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast
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
from slipstream.core.backoff import Backoff
from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.settings.sections import QueueEnd

# The values of the mark, of `added`, of `removed`, and of a sender's own `added`.
Counted: TypeAlias = Sequence[bytes | None]
REQUIRED_SETTINGS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    # With "yes" nothing is synced while the append-only file is rewritten.
    "no-appendfsync-on-rewrite": "no",
}
RECONNECT_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
# Errors of redis-py when the server does not answer.
CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, WatchError, OSError)
# Fields of a stream entry; COUNTS has `Delivery.tokens` and `Delivery.sent`.
ID, DATA, COUNTS = b"id", b"data", b"counts"
COUNTS_FORMAT = struct.Struct("<QQQ")
REFUSALS = (AuthenticationError, AuthorizationError, ssl.SSLCertVerificationError)

# Patterns of the server's and the client library's messages about a command without rights.
REFUSED_COMMAND = re.compile(r"run the '([^']+)' command")
COMMAND_OF_PIPELINE = re.compile(r"Command # \d+ \((\w+)")

ON_LOSS = "start the run again: it generates lost trajectories again"

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def draw_mark(stream_bytes: int) -> str:
    """Returns a new mark: a random id of the data in Redis, with the bytes already in the stream.

    The counters of a new mark begin at 0 and do not count these `stream_bytes`.
    """
    return f"{secrets.token_hex(8)}-{stream_bytes}"


@dataclass(frozen=True)
class Counters:
    """Bytes in the stream when the mark was drawn, and bytes added and removed since.

    One transaction adds an entry and increments `added`; another deletes it and increments
    `removed`. So the bytes in the stream always equal the bytes of the mark, plus `added`, minus
    `removed`, and no counter ever decreases. Otherwise data were lost: by a flush, an eviction, an
    older file or replica. A sender's own counter reveals an older file even when other senders have
    since added more bytes than were lost.
    """

    first_bytes: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0
    # Bytes that were added by the sender that reads the counters.
    own_bytes: int = 0

    @classmethod
    def of(cls, found: Counted) -> Counters:
        """Returns the counters from the values of `RedisConnection.counted_keys`.

        Raises QueueError when the mark is missing or a counter is not a number.
        """
        mark, added, removed, *own = found
        if mark is None:
            raise QueueError("it came back empty; was it restarted without its append-only file?")
        _, _, first = mark.partition(b"-")
        return cls(_number(first), _number(added), _number(removed), *map(_number, own))

    @property
    def used_bytes(self) -> int:
        """Number of bytes of all entries in the stream."""
        return self.first_bytes + self.added_bytes - self.removed_bytes

    def newest(self, other: Counters) -> Counters:
        """Returns the larger value of each counter, because answers may overtake each other."""
        return Counters(
            self.first_bytes,
            max(self.added_bytes, other.added_bytes),
            max(self.removed_bytes, other.removed_bytes),
            max(self.own_bytes, other.own_bytes),
        )

    def loss_since(self, earlier: Counters) -> str:
        """Returns the evidence of a loss of data since `earlier` was read, or "" without a loss."""
        if self.used_bytes < 0:
            return f"it counts {self.used_bytes} bytes that wait"
        for name, before, now in (
            ("added", earlier.added_bytes, self.added_bytes),
            ("removed", earlier.removed_bytes, self.removed_bytes),
            ("added by this server", earlier.own_bytes, self.own_bytes),
        ):
            if now < before:
                return f"it counts {now} bytes {name}, and counted {before} before"
        return ""

    def loss_against(self, stream_bytes: int) -> str:
        """Returns the evidence of a loss of data if `stream_bytes` is not `used_bytes`, else ""."""
        if self.used_bytes != stream_bytes:
            return f"it counts {self.used_bytes} bytes that wait, and has {stream_bytes}"
        return ""


def loss_in(found: Counted, stream_bytes: int) -> str:
    """Returns the evidence of a loss of data if the counters `found` do not fit `stream_bytes`.

    Returns "" without a loss.
    """
    try:
        return Counters.of(found).loss_against(stream_bytes)
    except QueueError as error:
        return str(error)


def _number(value: bytes | None) -> int:
    digits = value or b"0"
    if not digits.isdigit():
        raise QueueError(f"a counter holds {digits[:40]!r}, which is no number of bytes")
    return int(digits)


class RedisConnection:
    """A connection to Redis, with one run's keys and the mark by which lost data are noticed."""

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        sender: str = "",
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
    ) -> None:
        """Takes `sender`, the name of a sender's own counter in Redis, or "" for the receiver.

        A lost connection to Redis is retried for `reconnect_timeout_s`. Raises QueueError if `url`
        is invalid.
        """
        self._reconnect_timeout_s = reconnect_timeout_s
        self.name = _without_password(url)
        self._run_id, self._sender = run_id, sender
        prefix = f"slipstream:{run_id}"
        self.stream = f"{prefix}:trajectories"
        self.mark_key = f"{prefix}:mark"
        # The controller draws the mark; another mark or none later means that data are gone.
        self.mark: str | None = None
        # The last counters that were read under this mark.
        self.counters = Counters()
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

    @property
    def added_key(self) -> str:
        """Redis key of the count of all bytes that all senders have added under this mark."""
        return f"{self.mark_key}:{self.mark}:added"

    @property
    def own_key(self) -> str:
        """Redis key of the count of all bytes that this sender has added under this mark."""
        return f"{self.mark_key}:{self.mark}:{self._sender}:added"

    @property
    def removed_key(self) -> str:
        """Redis key of the count of all bytes that were acknowledged under this mark."""
        return f"{self.mark_key}:{self.mark}:removed"

    async def once(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Runs `call`. Raises TimeoutError after 10 s."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call()

    async def persistently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Runs `call`; repeats it for `reconnect_timeout_s` while the server is unreachable.

        Raises QueueError when the server stays unreachable or answers with an error, and
        ConfigError when the server refuses the user, or its certificate is not trusted.
        """
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        deadline = asyncio.get_running_loop().time() + self._reconnect_timeout_s
        while True:
            try:
                result = await self.once(call)
            except CONNECTION_ERRORS as error:
                if _refusal(error) is not None:
                    raise self.failure(error) from error
                # A call that timed out has no error text.
                cause = str(error) or f"a call had no answer for {CALL_TIMEOUT_S:g} s"
                if asyncio.get_running_loop().time() + backoff.next_s > deadline:
                    raise self.away(self._reconnect_timeout_s, cause) from error
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

    async def probe(self, command: Sequence[str]) -> None:
        """Runs a command with the retries of `persistently`.

        Raises ConfigError if the server refuses the user, and QueueError for any other failure.
        """
        await self.persistently(lambda: self.client.execute_command(*command))  # type: ignore[no-untyped-call]

    @property
    def counted_keys(self) -> tuple[str, ...]:
        """Redis keys of the mark and the counters, in the order of `Counted`, for one MGET."""
        own = (self.own_key,) if self._sender else ()
        return self.mark_key, self.added_key, self.removed_key, *own

    async def read_counters(self) -> Counters:
        """Returns the present counters. Raises QueueError when the server lost data."""
        earlier = self.counters
        return self.take_counters(await self._read_counted(self.client), earlier)

    async def follow_counters(self, reader: redis.asyncio.Redis | None = None) -> Counters:
        """Returns the present counters, read by the client `reader` if given.

        If a receiver has set a new mark, they are the counters under that mark. Raises QueueError
        when the server lost data.
        """
        earlier = self.counters
        while True:
            found = await self._read_counted(reader or self.client)
            if found[0] is None or _text(found[0]) == self.mark:
                await self._count_again(found, earlier)
                return self.take_counters(found, earlier)
            logger.warning("redis at %s holds the data of another start", self.name)
            self.mark, earlier = _text(found[0]), Counters()
            self.counters = earlier

    async def _count_again(self, found: Counted, earlier: Counters) -> None:
        """Increases Redis's count of added bytes by the bytes that it has lost since `earlier`.

        The receiver then sees that the count exceeds the bytes in the stream, so data were lost.
        """
        mark, added, _, *own = found
        if mark is not None and all(value is None or value.isdigit() for value in (added, *own)):
            missing = earlier.added_bytes - int(added or 0)
            missing = max(missing, earlier.own_bytes - int((*own, b"0")[0] or 0))
            if missing > 0:
                await self.client.incrby(self.added_key, missing)

    async def _read_counted(self, reader: redis.asyncio.Redis) -> Counted:
        return cast("Counted", await reader.mget(*self.counted_keys))

    def take_counters(self, found: Counted, earlier: Counters) -> Counters:
        """Returns the counters `found`, checked against `earlier`; keeps the newest value of each.

        Raises QueueError when data were lost.
        """
        try:
            counters = Counters.of(found)
        except QueueError as error:
            raise self.lost(str(error)) from None
        if found[0] is not None and _text(found[0]) != self.mark:
            raise self.lost("it holds the data of another start")
        if loss := counters.loss_since(earlier):
            raise self.lost(loss)
        self.counters = counters.newest(self.counters)
        return counters

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
            found = REFUSED_COMMAND.search(text) or COMMAND_OF_PIPELINE.search(text)
            # The rest of a pipeline's message holds the command's data.
            what = "a right" if found is None else f"the right to {found[1].lower()}"
            return ConfigError(
                f"redis at {self.name}: user {self.user} lacks {what} on the keys of run "
                f"{self._run_id}; docs/security.md has the lines that give all rights"
            )
        if isinstance(error, REFUSALS):
            return ConfigError(f"redis at {self.name}: user {self.user}: {error}")
        return QueueError(f"redis at {self.name}: {error}")

    async def find_mark(self) -> None:
        """Reads mark and counters. Raises QueueError if Redis has no mark or has lost data."""
        self.mark = await self.read_mark()
        if self.mark is None:
            raise QueueError(
                f"redis at {self.name} does not know run {self._run_id}: the controller opens "
                "its queue first; was it emptied since, or is it another server?"
            )
        await self.read_counters()

    async def read_mark(self) -> str | None:
        """Returns the run's mark in Redis, or None if Redis has none."""
        found = cast("bytes | None", await self.client.get(self.mark_key))
        return None if found is None else _text(found)

    async def set_mark(self, mark: str) -> None:
        """Sets a new mark with new counters."""
        self.mark, self.counters = mark, Counters()
        async with self.client.pipeline(transaction=True) as pipeline:
            pipeline.set(self.mark_key, mark)
            pipeline.incrby(self.removed_key, 0)
            await pipeline.execute()


def _refusal(error: BaseException) -> BaseException | None:
    """Returns the error on user or certificate that redis-py wrapped in `error`, or None."""
    wrapped = (error, error.__cause__, error.__context__)
    return next((each for each in wrapped if isinstance(each, REFUSALS)), None)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


async def check_settings(connection: RedisConnection) -> None:
    """Raises QueueError when the server may lose acknowledged writes.

    Only logs a warning if the server does not show its settings.
    """
    try:
        found = await connection.client.config_get(*REQUIRED_SETTINGS)
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
    settings = {_text(key): _text(value) for key, value in found.items()}
    for setting, needed in REQUIRED_SETTINGS.items():
        value = settings.get(setting)
        if value != needed:
            raise QueueError(
                f"redis at {connection.name}: {setting} must be {needed} so that nothing is lost, "
                f"got {value}"
            )


# Commands that a client sends before and around its own commands.
_CONNECTION = "+auth +hello +ping +select +client|setname +multi +exec +discard +unwatch"
_STREAM, _MARKS = "~slipstream:*:trajectories", "%R~slipstream:*:mark*"
# The stream of a run that does not exist.
_PROBED = "slipstream:probe:trajectories"


@dataclass(frozen=True)
class QueueRole:
    """The Redis user of one end of the queue, and its rights.

    The rollout server only adds trajectories and counts their bytes; the controller reads them,
    deletes them, and makes the stream. Rights on single keys need selectors: Redis 7 or Valkey.
    """

    # Name of the user that the embedded server and deploy/make_certificates.sh make.
    user: str
    # Arguments of ACL SETUSER, without the password.
    rules: str
    # A command that writes in this role, and changes nothing where no stream is.
    probe: tuple[str, ...]


ROLLOUT_SERVER = QueueRole(
    user="rollout",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} (+xadd {_STREAM}) "
        f"(+watch +incrby ~slipstream:*:mark:*:added) (+get +mget {_MARKS})"
    ),
    probe=("XADD", _PROBED, "NOMKSTREAM", "*", "id", ""),
)
CONTROLLER = QueueRole(
    user="controller",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} +config|get "
        f"(+xgroup|create +xreadgroup +xrange +xack +xdel {_STREAM}) "
        f"(+set ~slipstream:*:mark) (+incrby ~slipstream:*:mark:*:removed) (+get +mget {_MARKS})"
    ),
    probe=("XDEL", _PROBED, "0-1"),
)
# No client logs in as this user. But many servers load transactions from their files with its
# rights, and silently drop the transactions that it may not write.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
ROLES: Mapping[QueueEnd, QueueRole] = {"controller": CONTROLLER, "rollout_server": ROLLOUT_SERVER}
