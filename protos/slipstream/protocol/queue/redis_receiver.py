"""Receives trajectories from the Redis queue, for the controller.

Consumes: entries of the stream, first entries that are pending for this receiver. Produces:
deliveries, which `get` returns. Waits for: new entries. Unblocked by: a `put` of any sender;
acknowledgements wake `_forget`.

Once a second the receiver reads the rest of the stream and the counters in one transaction. The
bytes of all known entries must then equal the counters; otherwise data were lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeAlias, cast

from redis.exceptions import RedisError, ResponseError
from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.base import Amount, Delivery
from slipstream.protocol.queue.redis_connection import (
    CONNECTION_ERRORS,
    COUNTS,
    COUNTS_FORMAT,
    DATA,
    ID,
    RECONNECT_TIMEOUT_S,
    Counted,
    Counters,
    RedisConnection,
    check_settings,
    draw_mark,
    loss_in,
)
from slipstream.protocol.queue.seal import SMALL_BYTES, OpenSeal, not_sealed, without_seal

GROUP = "controller"
CONSUMER = "controller"
BLOCK_MS = 1_000
ENTRIES_PER_READ = 16
MAX_REMEMBERED_IDS = 8192
AUDIT_S = 1.0
# First words of errors when a stream or its group is missing, or was deleted during a read.
STREAM_IS_GONE = ("NOGROUP", "UNBLOCKED")

# Id and fields; the fields are missing if another client deleted a pending entry.
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes] | None]]

logger = logging.getLogger(__name__)


class RedisReceiver:
    """The controller's side of the queue.

    The receiver reads and deletes in the background while its `async with` block runs. If Redis
    lost data before the block, the receiver sets a new mark and delivers the remaining entries. If
    Redis stays unreachable or loses data later, the block ends with an ExceptionGroup of a
    QueueError.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        open_seal: OpenSeal = without_seal,
        *,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
    ) -> None:
        """Takes `open_seal`; an entry that it refuses is logged and removed from Redis.

        A lost connection to Redis is retried for `reconnect_timeout_s`.
        """
        self._open_seal = open_seal
        self._connection = RedisConnection(url, run_id, reconnect_timeout_s=reconnect_timeout_s)
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue(ENTRIES_PER_READ)
        self.given = Amount()
        self.backlog: list[TrajectoryId] = []
        # Entries of each unacknowledged trajectory, with their sizes: several if a sender did not
        # get the answer to its XADD.
        self._entries: dict[TrajectoryId, dict[bytes, int]] = {}
        self._acknowledged: OrderedDict[TrajectoryId, None] = OrderedDict()
        self._to_forget: dict[bytes, int] = {}
        # Entries of `_to_forget` that Redis may have deleted already.
        self._perhaps_gone: set[bytes] = set()
        self._wake_forgetter = asyncio.Event()
        # Held while counters in Redis are compared or changed.
        self._counting = asyncio.Lock()
        self._audited_s = float("-inf")
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RedisReceiver:
        connection = self._connection
        try:
            await connection.persistently(partial(check_settings, connection))
            while not await self._take_mark():
                pass
            await connection.persistently(self._create_group)
        except BaseException:
            await connection.client.aclose()
            raise
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks = [group.create_task(self._read()), group.create_task(self._forget())]
        return self

    async def __aexit__(self, *raised: Any) -> None:  # noqa: ANN401 - passed on
        await self.aclose()
        try:
            await self._stack.__aexit__(*raised)
            if self._to_forget:
                await self._connection.persistently(self._delete)
        finally:
            await self._connection.client.aclose()

    @property
    def mark(self) -> str:
        """The id of the data in Redis; keep it to notice a loss of data after a restart."""
        assert self._connection.mark is not None
        return self._connection.mark

    async def get(self) -> Delivery:
        """Waits for the next trajectory and returns it; see `TrajectoryReceiver`."""
        delivery = await self._deliveries.get()
        self.given = self.given.plus(delivery.tokens)
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Makes the queue drop these trajectories; Redis deletes their entries soon after."""
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
        """Stops receiving; unacknowledged trajectories stay in Redis."""
        for task in self._tasks:
            task.cancel()

    async def _take_mark(self) -> bool:
        """Reads mark and backlog; returns True if the mark's counters match the stream.

        Otherwise sets a new mark and returns False: the caller tries again.
        """
        connection, after, stream_bytes = self._connection, b"-", 0
        connection.mark = await connection.persistently(connection.read_mark)
        self.backlog = []
        while True:
            entries, found = await connection.persistently(partial(self._scan, after))
            stream_bytes += sum(_size(fields) for _, fields in entries)
            self.backlog += [_id_of(entry_id, fields) for entry_id, fields in entries]
            if len(entries) < ENTRIES_PER_READ:
                break
            after = b"(" + entries[-1][0]
        if not (loss := loss_in(found, stream_bytes)):
            connection.take_counters(found, Counters())
            return True
        if connection.mark is not None:
            logger.warning(
                "redis at %s lost data: %s; its remaining entries are delivered",
                connection.name,
                loss,
            )
        mark = draw_mark(stream_bytes)
        await connection.persistently(partial(connection.set_mark, mark))
        return False

    async def _scan(self, after: bytes) -> tuple[Entries, Counted]:
        """Returns some entries after an id, and the mark with its counters, in one transaction."""
        connection = self._connection
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.xrange(connection.stream, after, count=ENTRIES_PER_READ)
            pipeline.mget(*connection.counted_keys)
            entries, found = await pipeline.execute()
        return entries, found

    async def _create_group(self) -> None:
        try:
            await self._connection.client.xgroup_create(
                self._connection.stream, GROUP, id="0", mkstream=True
            )
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _read(self) -> None:
        """Reads entries left pending by an earlier receiver or a lost answer, then new ones."""
        connection = self._connection
        while True:
            entries = await connection.persistently(partial(self._fetch, b"0"))
            while entries:
                await self._deliver(entries)
                entries = await connection.persistently(partial(self._fetch, entries[-1][0]))
            try:
                while True:
                    await self._deliver(await connection.once(self._fetch_new))
            except CONNECTION_ERRORS as error:
                logger.warning("redis at %s: %s", connection.name, error)
            except RedisError as error:
                raise connection.failure(error) from error

    async def _fetch_new(self) -> Entries:
        if asyncio.get_running_loop().time() < self._audited_s + AUDIT_S:
            return await self._fetch(b">")
        async with self._counting:
            return await self._audit()

    async def _audit(self) -> Entries:
        """Returns new entries, and compares all known entries with Redis's counters.

        Raises QueueError if they differ, because data were lost.
        """
        connection = self._connection
        earlier = connection.counters
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.xreadgroup(GROUP, CONSUMER, {connection.stream: b">"}, count=ENTRIES_PER_READ)
            pipeline.mget(*connection.counted_keys)
            answer, found = await pipeline.execute(raise_on_error=False)
        counters = connection.take_counters(found, earlier)
        if isinstance(answer, ResponseError):
            raise self._group_lost(answer)
        entries = _entries_of(answer)
        # Otherwise entries may be left, or Redis may have deleted some already.
        if len(entries) < ENTRIES_PER_READ and not self._perhaps_gone:
            self._audited_s = asyncio.get_running_loop().time()
            known = dict(self._to_forget)
            for sizes in self._entries.values():
                known |= sizes
            known |= {entry_id: _size(fields) for entry_id, fields in entries}
            if loss := counters.loss_against(sum(known.values())):
                raise connection.lost(loss)
        return entries

    def _group_lost(self, error: ResponseError) -> QueueError | ConfigError:
        if str(error).startswith(STREAM_IS_GONE):
            return self._connection.lost("the stream or its group is gone")
        return self._connection.failure(error)

    async def _fetch(self, after: bytes) -> Entries:
        """Returns pending entries after the id `after`, or new entries if `after` is ">"."""
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
            if str(error).startswith(STREAM_IS_GONE):
                await connection.read_counters()
            raise self._group_lost(error) from error
        return _entries_of(answer)

    async def _deliver(self, entries: Entries) -> None:
        for entry_id, fields in entries:
            if not fields:
                await self._drop(entry_id)
                continue
            trajectory_id, data = _id_of(entry_id, fields), fields.get(DATA, b"")
            if len(data) <= SMALL_BYTES:
                opened = self._open_seal(trajectory_id, data)
            else:
                opened = await asyncio.to_thread(self._open_seal, trajectory_id, data)
            known = self._entries.get(trajectory_id)
            if opened is None:
                logger.warning("redis at %s: %s", self._connection.name, not_sealed(trajectory_id))
                self._to_forget[entry_id] = len(data)
                self._wake_forgetter.set()
            elif trajectory_id in self._acknowledged:
                # The entry was read as pending, perhaps just before it was deleted.
                self._perhaps_gone.add(entry_id)
                self._to_forget[entry_id] = len(data)
                self._wake_forgetter.set()
            elif known is not None:
                known[entry_id] = len(data)
            else:
                self._entries[trajectory_id] = {entry_id: len(data)}
                counts = _counts(fields)
                await self._deliveries.put(Delivery(trajectory_id, opened, *counts))

    async def _drop(self, entry_id: bytes) -> None:
        """Acknowledges a pending entry whose data were deleted before this receiver began."""
        connection = self._connection
        if any(entry_id in entries for entries in self._entries.values()):
            raise connection.lost(f"entry {entry_id.decode()} was deleted by another client")
        logger.warning("redis at %s: entry %s is gone", connection.name, entry_id.decode())
        await connection.persistently(
            partial(connection.client.xack, connection.stream, GROUP, entry_id)
        )

    async def _forget(self) -> None:
        while True:
            await self._wake_forgetter.wait()
            self._wake_forgetter.clear()
            while self._to_forget:
                async with self._counting:
                    await self._connection.persistently(self._delete)

    async def _delete(self) -> None:
        """Acknowledges and deletes the entries of `_to_forget`, and counts their bytes as removed.

        All of this is one transaction.
        """
        connection, entries = self._connection, dict(self._to_forget)
        for entry_id in self._perhaps_gone & set(entries):
            if not await connection.client.xrange(connection.stream, entry_id, entry_id, count=1):
                del entries[entry_id], self._to_forget[entry_id]
                self._perhaps_gone.discard(entry_id)
        if not entries:
            return
        earlier = connection.counters
        # Without an answer the transaction may or may not have run.
        self._perhaps_gone |= set(entries)
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.xack(connection.stream, GROUP, *entries)
            pipeline.xdel(connection.stream, *entries)
            pipeline.incrby(connection.removed_key, sum(entries.values()))
            pipeline.mget(*connection.counted_keys)
            _, num_deleted, _, found = await pipeline.execute()
        connection.take_counters(found, earlier)
        if num_deleted != len(entries):
            raise connection.lost(
                f"{len(entries) - num_deleted} entries were deleted by another client"
            )
        self._perhaps_gone -= set(entries)
        for entry_id in entries:
            del self._to_forget[entry_id]


def _entries_of(answer: object) -> Entries:
    streams = cast("list[tuple[bytes, Entries]]", answer or [])
    return [entry for _, entries in streams for entry in entries]


def _id_of(entry_id: bytes, fields: Mapping[bytes, bytes] | None) -> TrajectoryId:
    """Returns an entry's trajectory id, or an id made from `entry_id` if the entry has none."""
    return TrajectoryId((fields or {}).get(ID, b"redis-" + entry_id).decode(errors="replace"))


def _counts(fields: Mapping[bytes, bytes]) -> tuple[int, Amount]:
    """Returns `Delivery.tokens` and `Delivery.sent` of an entry, or zeros if the entry has none."""
    packed = fields.get(COUNTS, b"")
    if len(packed) != COUNTS_FORMAT.size:
        return 0, Amount()
    tokens, *sent = COUNTS_FORMAT.unpack(packed)
    return tokens, Amount(*sent)


def _size(fields: Mapping[bytes, bytes] | None) -> int:
    return len((fields or {}).get(DATA, b""))
