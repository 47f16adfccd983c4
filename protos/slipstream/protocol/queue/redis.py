"""Trajectories over a Redis Stream: what `put` has stored outlives every process but Redis's files.

Sender. Consumes: `put`. Produces: stream entries, and the shared count of bytes in one transaction.
Waits for: free bytes, by polling. Unblocked by: acknowledgements, which lower the count.
Receiver. Consumes: the stream, its own pending entries first. Produces: `get`.
Waits for: new entries. Unblocked by: a `put` anywhere.

Redis or Valkey from 6.2; it must fsync every write and never evict.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TypeAlias, cast

from redis.exceptions import RedisError, ResponseError, WatchError
from slipstream.protocol.errors import QueueError
from slipstream.protocol.queue.base import Delivery
from slipstream.protocol.queue.budget import check_fits, queue_full
from slipstream.protocol.queue.embedded import EmbeddedServer
from slipstream.protocol.queue.redis_connection import (
    CONNECTION_ERRORS,
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    RedisConnection,
)
from slipstream.protocol.types import TrajectoryId

GROUP = "controller"
CONSUMER = "controller"
# Fields of an entry.
ID, DATA = b"id", b"data"

BLOCK_MS = 1_000
WATCH_S = 0.5
ENTRIES_PER_READ = 16
MAX_REMEMBERED_IDS = 65_536

__all__ = ["EmbeddedServer", "RedisReceiver", "RedisSender"]

logger = logging.getLogger(__name__)

# Id and fields; the fields are missing when somebody deleted a pending entry.
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes] | None]]


class RedisSender:
    """The rollout server's end; `put` returns when the trajectory is on Redis's disk.

    A Redis that stays away or comes back empty ends the `async with` block with an ExceptionGroup
    of a QueueError.
    """

    def __init__(self, url: str, run_id: str, max_bytes: int) -> None:
        """`max_bytes` bounds what all senders of the run have put and nobody acknowledged."""
        self._connection = RedisConnection(url, run_id)
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._in_turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._stack = AsyncExitStack()
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> RedisSender:
        await self._connection.open()
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._watcher = group.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
        try:
            await self._stack.__aexit__(kind, error, trace)
        finally:
            await self._connection.client.aclose()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait in Redis, of all senders, half a second ago at most."""
        return self._used_bytes

    async def put(self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float) -> None:
        """See `TrajectorySender.put`; QueueError when Redis is lost for `timeout_s`."""
        if self._watcher is None or self._closed:
            raise QueueError("the sender is closed")
        check_fits(len(data), self._max_bytes)
        try:
            async with asyncio.timeout(timeout_s), self._in_turn:
                backoff_s = FIRST_BACKOFF_S
                add = partial(self._add, trajectory_id, data)
                while not await self._connection.persistently(add):
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        except TimeoutError:
            if self._connection.trouble is not None:
                raise QueueError(
                    f"redis at {self._connection.name} does not answer within {timeout_s:g} s: "
                    f"{self._connection.trouble}"
                ) from None
            raise queue_full(len(data), timeout_s, self._used_bytes, self._max_bytes) from None

    async def aclose(self) -> None:
        """See `TrajectorySender.aclose`."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self) -> None:
        """Keeps `queued_bytes` up to date while it is not 0."""
        connection = self._connection
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._used_bytes:
                await asyncio.sleep(WATCH_S)
                used = await connection.persistently(
                    lambda: connection.client.get(connection.used_bytes)
                )
                self._used_bytes = int(used or 0)

    async def _add(self, trajectory_id: TrajectoryId, data: bytes) -> bool:
        """One attempt; False while there is no room."""
        connection = self._connection
        async with connection.client.pipeline(transaction=True) as pipeline:
            while True:
                await pipeline.watch(connection.used_bytes)
                mark, used = await pipeline.mget(connection.mark_key, connection.used_bytes)
                connection.check_mark(mark)
                self._used_bytes = int(used or 0)
                if self._used_bytes + len(data) > self._max_bytes:
                    return False
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.xadd(connection.stream, {ID: trajectory_id, DATA: data})
                pipeline.incrby(connection.used_bytes, len(data))
                try:
                    _, self._used_bytes = await pipeline.execute()
                except WatchError:
                    continue
                self._changed.set()
                return True


class RedisReceiver:
    """The controller's end. Reads in the background while its `async with` block runs.

    A Redis that stays away or comes back empty ends the block with an ExceptionGroup of a
    QueueError.
    """

    def __init__(self, url: str, run_id: str, *, mark: str | None = None) -> None:
        """`mark`: that of an earlier receiver of the run; QueueError when Redis has another."""
        self._connection = RedisConnection(url, run_id)
        self._connection.mark = mark.encode() if mark is not None else None
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue(ENTRIES_PER_READ)
        # Entries of each unacknowledged trajectory, with their sizes: more than one when a sender
        # did not see the answer to its XADD.
        self._entries: dict[TrajectoryId, dict[bytes, int]] = {}
        self._acknowledged: OrderedDict[TrajectoryId, None] = OrderedDict()
        self._to_forget: dict[bytes, int] = {}
        self._forgetting = asyncio.Lock()
        self._perhaps_gone: set[bytes] = set()
        self._stack = AsyncExitStack()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RedisReceiver:
        await self._connection.open(self._create_group)
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._reader = group.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
        try:
            await self._stack.__aexit__(kind, error, trace)
        finally:
            await self._connection.client.aclose()

    @property
    def mark(self) -> str:
        """Proof of identity of the data in Redis.

        Keep it to notice after a restart that they went.
        """
        assert self._connection.mark is not None
        return self._connection.mark.decode()

    async def get(self) -> Delivery:
        """See `TrajectoryReceiver.get`."""
        return await self._deliveries.get()

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """See `TrajectoryReceiver.acknowledge`; returns when Redis has forgotten them."""
        entries: dict[bytes, int] = {}
        for trajectory_id in trajectory_ids:
            found = self._entries.pop(trajectory_id, None)
            if found is None:
                continue
            entries |= found
            self._acknowledged[trajectory_id] = None
            if len(self._acknowledged) > MAX_REMEMBERED_IDS:
                self._acknowledged.popitem(last=False)
        await self._forget(entries)

    async def aclose(self) -> None:
        """See `TrajectoryReceiver.aclose`."""
        if self._reader is not None:
            self._reader.cancel()

    async def _create_group(self) -> None:
        try:
            await self._connection.client.xgroup_create(
                self._connection.stream, GROUP, id="0", mkstream=True
            )
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _read(self) -> None:
        """First what an earlier receiver, or a lost answer, left pending; then what is new."""
        connection = self._connection
        while True:
            entries = await connection.persistently(partial(self._fetch, b"0"))
            while entries:
                await self._deliver(entries)
                entries = await connection.persistently(partial(self._fetch, entries[-1][0]))
            try:
                while True:
                    await self._deliver(await connection.once(partial(self._fetch, b">")))
            except CONNECTION_ERRORS as error:
                logger.warning("redis at %s: %s", connection.name, error)
            except RedisError as error:
                raise QueueError(f"redis at {connection.name}: {error}") from error

    async def _fetch(self, after: bytes) -> Entries:
        """Pending entries after an id, or new ones."""
        connection = self._connection
        try:
            answer = await connection.client.xreadgroup(
                GROUP,
                CONSUMER,
                {connection.stream: after},
                count=ENTRIES_PER_READ,
                block=BLOCK_MS if after == b">" else None,
            )
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):
                connection.check_mark(await connection.client.get(connection.mark_key))
            raise
        streams = cast("list[tuple[bytes, Entries]]", answer or [])
        return [entry for _, entries in streams for entry in entries]

    async def _deliver(self, entries: Entries) -> None:
        for entry_id, fields in entries:
            await self._deliver_one(entry_id, fields)

    async def _deliver_one(self, entry_id: bytes, fields: dict[bytes, bytes] | None) -> None:
        if not fields:
            raise QueueError(
                f"redis at {self._connection.name}: entry {entry_id.decode()} of "
                f"{self._connection.stream} was deleted by somebody before it was acknowledged"
            )
        trajectory_id, data = TrajectoryId(fields[ID].decode()), fields[DATA]
        known = self._entries.get(trajectory_id)
        if trajectory_id in self._acknowledged:
            # Read as pending, perhaps just before it was deleted.
            self._perhaps_gone.add(entry_id)
            await self._forget({entry_id: len(data)})
        elif known is not None:
            known[entry_id] = len(data)
        else:
            self._entries[trajectory_id] = {entry_id: len(data)}
            await self._deliveries.put(Delivery(trajectory_id, data))

    async def _forget(self, entries: dict[bytes, int]) -> None:
        self._to_forget |= entries
        async with self._forgetting:
            if self._to_forget:
                await self._connection.persistently(self._delete)

    async def _delete(self) -> None:
        """Acknowledges, deletes and uncounts what is to be forgotten, all or nothing."""
        connection, entries = self._connection, dict(self._to_forget)
        async with connection.client.pipeline(transaction=True) as pipeline:
            await pipeline.watch(connection.mark_key)
            connection.check_mark(await pipeline.get(connection.mark_key))
            for entry_id in self._perhaps_gone & set(entries):
                if not await pipeline.xrange(connection.stream, entry_id, entry_id, count=1):
                    del entries[entry_id], self._to_forget[entry_id]
            self._perhaps_gone &= set(self._to_forget)
            if not entries:
                return
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.xack(connection.stream, GROUP, *entries)
            pipeline.xdel(connection.stream, *entries)
            pipeline.decrby(connection.used_bytes, sum(entries.values()))
            # Unless the answer arrives, it may have happened or not.
            self._perhaps_gone |= set(entries)
            await pipeline.execute()
        self._perhaps_gone -= set(entries)
        for entry_id in entries:
            del self._to_forget[entry_id]
