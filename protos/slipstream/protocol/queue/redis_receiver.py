"""The controller's end of the Redis queue.

Consumes: entries of the stream, its own pending ones first. Produces: `get`.
Waits for: new entries. Unblocked by: a `put` anywhere; acknowledgements wake the forgetting.
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

from redis.exceptions import RedisError, ResponseError
from slipstream.protocol.errors import QueueError
from slipstream.protocol.queue.base import Delivery
from slipstream.protocol.queue.redis_connection import (
    CONNECTION_ERRORS,
    DATA,
    ID,
    RedisConnection,
)
from slipstream.protocol.types import TrajectoryId

GROUP = "controller"
CONSUMER = "controller"
BLOCK_MS = 1_000
ENTRIES_PER_READ = 16
MAX_REMEMBERED_IDS = 65_536

# Id and fields; the fields are missing when somebody deleted a pending entry.
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes] | None]]

logger = logging.getLogger(__name__)


class RedisReceiver:
    """The controller's end. Reads and forgets in the background while its `async with` block runs.

    A Redis that stays away or comes back empty ends the block with an ExceptionGroup of a
    QueueError.
    """

    def __init__(self, url: str, run_id: str, *, mark: str | None = None) -> None:
        """`mark`: that of an earlier receiver of the run; QueueError when Redis has another."""
        self._connection = RedisConnection(url, run_id)
        self._connection.mark = mark
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue(ENTRIES_PER_READ)
        # Entries of each unacknowledged trajectory, with their sizes: more than one when a sender
        # did not see the answer to its XADD.
        self._entries: dict[TrajectoryId, dict[bytes, int]] = {}
        self._acknowledged: OrderedDict[TrajectoryId, None] = OrderedDict()
        self._to_forget: dict[bytes, int] = {}
        # Those of `_to_forget` that Redis may have forgotten already.
        self._perhaps_gone: set[bytes] = set()
        self._wake_forgetter = asyncio.Event()
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RedisReceiver:
        connection = self._connection
        await connection.open(connection.check_settings, connection.draw_mark, self._create_group)
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks = [group.create_task(self._read()), group.create_task(self._forget())]
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
            if self._to_forget:
                await self._connection.persistently(self._delete)
        finally:
            await self._connection.client.aclose()

    @property
    def mark(self) -> str:
        """Identity of the data in Redis; keep it to notice after a restart that they went."""
        assert self._connection.mark is not None
        return self._connection.mark

    async def get(self) -> Delivery:
        """See `TrajectoryReceiver.get`."""
        return await self._deliveries.get()

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """See `TrajectoryReceiver.acknowledge`; Redis forgets them soon after."""
        for trajectory_id in trajectory_ids:
            entries = self._entries.pop(trajectory_id, None)
            if entries is None:
                continue
            self._to_forget |= entries
            self._acknowledged[trajectory_id] = None
            if len(self._acknowledged) > MAX_REMEMBERED_IDS:
                self._acknowledged.popitem(last=False)
        self._wake_forgetter.set()

    async def aclose(self) -> None:
        """See `TrajectoryReceiver.aclose`."""
        for task in self._tasks:
            task.cancel()

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
                raise connection.failure(error) from error

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
            if not fields:
                raise QueueError(
                    f"redis at {self._connection.name}: entry {entry_id.decode()} of "
                    f"{self._connection.stream} was deleted by somebody before it was acknowledged"
                )
            # Whatever somebody else wrote there: it is acknowledged like any other.
            name = fields.get(ID, b"redis-" + entry_id).decode(errors="replace")
            trajectory_id, data = TrajectoryId(name), fields.get(DATA, b"")
            known = self._entries.get(trajectory_id)
            if trajectory_id in self._acknowledged:
                # Read as pending, perhaps just before it was deleted.
                self._perhaps_gone.add(entry_id)
                self._to_forget[entry_id] = len(data)
                self._wake_forgetter.set()
            elif known is not None:
                known[entry_id] = len(data)
            else:
                self._entries[trajectory_id] = {entry_id: len(data)}
                await self._deliveries.put(Delivery(trajectory_id, data))

    async def _forget(self) -> None:
        while True:
            await self._wake_forgetter.wait()
            self._wake_forgetter.clear()
            while self._to_forget:
                await self._connection.persistently(self._delete)

    async def _delete(self) -> None:
        """Acknowledges, deletes and uncounts what is to be forgotten, all or nothing."""
        connection, entries = self._connection, dict(self._to_forget)
        for entry_id in self._perhaps_gone & set(entries):
            if not await connection.client.xrange(connection.stream, entry_id, entry_id, count=1):
                del entries[entry_id], self._to_forget[entry_id]
                self._perhaps_gone.discard(entry_id)
        if not entries:
            return
        # Unless the answer arrives, it may have happened or not.
        self._perhaps_gone |= set(entries)
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.get(connection.mark_key)
            pipeline.xack(connection.stream, GROUP, *entries)
            pipeline.xdel(connection.stream, *entries)
            pipeline.incrby(connection.removed_key, sum(entries.values()))
            mark, *_ = await pipeline.execute()
        connection.check_mark(mark)
        self._perhaps_gone -= set(entries)
        for entry_id in entries:
            del self._to_forget[entry_id]
