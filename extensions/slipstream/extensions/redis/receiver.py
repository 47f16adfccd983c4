"""Receives trajectories from the Redis queue, for the controller.

Consumes: entries of the stream, first entries that are pending for this receiver. Produces:
deliveries, which `get` returns. Waits for: new entries. Unblocked by: a `put` of any sender;
acknowledgements wake `_forget`.

Once a second the receiver reads the rest of the stream and Redis's own counts of it in one
transaction: the entries that were ever added, and those that it has. If they are not those that
the receiver knows, data were lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc.aio
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from slipstream.core.errors import ConfigError, ProtocolError, QueueError
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.connection import (
    CONNECTION_ERRORS,
    DELIVERY,
    RedisConnection,
    check_settings,
)
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.run import ControlledRun
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.bounds import check_known, decode
from slipstream.protocol.queue.base import Delivery, OpenSeal, Tally, opened, opener
from slipstream.v1 import trajectory_pb2

GROUP = "controller"
CONSUMER = "controller"
BLOCK_MS = 1_000
ENTRIES_PER_READ = 16
AUDIT_S = 1.0
# First words of errors when a stream or its group is missing, or was deleted during a read, and
# when the server became a replica during a read.
STREAM_IS_GONE = ("NOGROUP", "UNBLOCKED the stream")
DEMOTED = "UNBLOCKED force"

logger = logging.getLogger(__name__)


class RedisReceiver:
    """The controller's side of the queue.

    The receiver reads and deletes in the background while its `async with` block runs. If Redis
    lost data before the block, the receiver delivers the remaining entries. If Redis stays
    unreachable or loses data later, the block ends with an ExceptionGroup of a QueueError.
    """

    def __init__(
        self, url: str, run_id: str, open_seal: OpenSeal, *, patience_s: float | None = None
    ) -> None:
        """Takes `open_seal`; an entry that it refuses is logged and removed from Redis."""
        self._open_seal = open_seal
        self._connection = RedisConnection(url, run_id, patience_s)
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue(ENTRIES_PER_READ)
        self.given = Tally()
        self.backlog: list[TrajectoryId] = []
        # Whether the stream had to be made, and the number of entries that were ever added to it.
        self.is_new = False
        self.added = 0
        # The largest id of an entry so far: all entries that are added later have larger ids.
        self._newest = (0, 0)
        # Trajectories of the entries that were read last.
        self._read_last: list[TrajectoryId] = []
        # Those of entries that `waiting` has seen and that may not be read yet, by the entry's id.
        self._unread: dict[tuple[int, int], TrajectoryId] = {}
        self._scanned = (0, 0)
        # Held while `waiting` scans, so that no entry is scanned twice.
        self._scanning = asyncio.Lock()
        # Entries of each unacknowledged trajectory, with their sizes: several if a sender did not
        # get the answer to its XADD.
        self._entries: dict[TrajectoryId, dict[bytes, int]] = {}
        self._to_forget: dict[bytes, int] = {}
        self._wake_forgetter = asyncio.Event()
        # Held while entries are deleted, and while what Redis has is compared with what is known.
        self._counting = asyncio.Lock()
        self._audited_s = float("-inf")
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RedisReceiver:
        connection = self._connection
        try:
            await connection.persistently(partial(check_settings, connection))
            await self._begin()
        except BaseException:
            await connection.client.aclose()
            raise
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        reading = group.create_task(self._read())
        forgetting = group.create_task(self._forget())
        self._tasks = [reading, forgetting]
        return self

    async def __aexit__(self, *raised: Any) -> None:  # noqa: ANN401 - passed on
        for task in self._tasks:
            task.cancel()
        async with aclosing(self._connection.client):
            await self._stack.__aexit__(*raised)
            if self._to_forget:
                await self._connection.persistently(self._delete)

    async def waiting(self) -> Sequence[TrajectoryId]:
        """Returns unacknowledged trajectories, and those of entries that are not read yet."""
        async with self._scanning:
            self._scanned = max(self._scanned, self._newest)
            num_entries = ENTRIES_PER_READ
            while num_entries == ENTRIES_PER_READ:
                after = b"(%d-%d" % self._scanned
                entries, *_ = await self._connection.persistently(partial(self._scan, after))
                for entry in entries:
                    self._scanned = _number(entry.entry_id)
                    for trajectory_id in _trajectories([entry]):
                        self._unread[self._scanned] = trajectory_id
                num_entries = len(entries)
            for number in [number for number in self._unread if number <= self._newest]:
                del self._unread[number]
            return [*self._entries, *self._read_last, *self._unread.values()]

    async def get(self) -> Delivery:
        delivery = await self._deliveries.get()
        self.given = self.given.plus(delivery.tokens)
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Makes the queue drop these trajectories; Redis deletes their entries soon after."""
        for trajectory_id in trajectory_ids:
            self._to_forget |= self._entries.pop(trajectory_id, {})
        self._wake_forgetter.set()

    async def _begin(self) -> None:
        """Makes the stream, reads the backlog and Redis's counts, corrects the count of bytes."""
        connection = self._connection
        after = b"-"
        stream_bytes = 0

        async def create_group() -> None:
            try:
                await connection.client.xgroup_create(
                    connection.stream, GROUP, id="0", mkstream=True
                )
                self.is_new = True
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

        await connection.persistently(create_group)
        while True:
            entries, inspected, stored_bytes = await connection.persistently(
                partial(self._scan, after)
            )
            stream_bytes += sum(entry.size for entry in entries)
            self.backlog += _trajectories(entries)
            if len(entries) < ENTRIES_PER_READ:
                break
            after = b"(" + entries[-1].entry_id
        _, self.added, self._newest = _counts(inspected, connection)
        lack = stream_bytes - connection.used_bytes(stored_bytes or b"0")
        # Senders may change the count at the same moment. The key is made here if it is missing.
        correct = partial(connection.client.incrby, connection.bytes_key, lack)
        await connection.persistently(correct)

    async def _scan(self, after: bytes) -> tuple[list[_Entry], Sequence[Any], bytes | None]:
        """Returns some entries after an id, and Redis's counts of entries and bytes."""
        connection = self._connection
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.xrange(connection.stream, after, count=ENTRIES_PER_READ)
            pipeline.execute_command(*connection.inspection)
            pipeline.get(connection.bytes_key)
            entries, inspected, stored_bytes = await pipeline.execute()
        return [_Entry.of(*entry) for entry in entries], inspected, stored_bytes

    async def _read(self) -> None:
        """Reads entries left pending by an earlier receiver or a lost answer, then new ones."""
        connection = self._connection
        after = b"0"
        while True:
            # An entry that is deleted after it was read would be taken for another one.
            async with self._counting:
                entries = await connection.persistently(partial(self._fetch, after))
                await self._deliver(entries)
            if entries:
                after = entries[-1].entry_id
                continue
            try:
                while True:
                    if asyncio.get_running_loop().time() < self._audited_s + AUDIT_S:
                        entries = await connection.once(partial(self._fetch, b">"))
                    else:
                        async with self._counting:
                            entries = await connection.once(self._audit)
                    await self._deliver(entries)
            except CONNECTION_ERRORS as error:
                logger.warning("redis at %s: %s", connection.name, error)
                after = b"0"
            except RedisError as error:
                raise connection.failure(error) from error

    async def _audit(self) -> list[_Entry]:
        """Returns new entries; raises QueueError if the known ones differ from Redis's counts."""
        connection = self._connection
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.xreadgroup(GROUP, CONSUMER, {connection.stream: b">"}, count=ENTRIES_PER_READ)
            pipeline.execute_command(*connection.inspection)
            pipeline.get(connection.bytes_key)
            answer, inspected, stored_bytes = await pipeline.execute(raise_on_error=False)
        for part in (answer, inspected, stored_bytes):
            if isinstance(part, ResponseError):
                raise self._group_lost(part)
        entries = self._entries_of(answer)
        # Otherwise entries may be left.
        if len(entries) < ENTRIES_PER_READ:
            self._audited_s = asyncio.get_running_loop().time()
            sizes_by_id = dict(self._to_forget)
            for sizes in self._entries.values():
                sizes_by_id |= sizes
            sizes_by_id |= {entry.entry_id: entry.size for entry in entries}
            length, added, _ = _counts(inspected, connection)
            if added != self.added:
                raise connection.lost(f"it counts {added} entries added, and {self.added} came")
            if length != len(sizes_by_id):
                raise connection.lost(f"it has {length} of {len(sizes_by_id)} entries that wait")
            if lack := sum(sizes_by_id.values()) - connection.used_bytes(stored_bytes):
                await connection.client.incrby(connection.bytes_key, lack)
        return entries

    def _group_lost(self, error: ResponseError) -> QueueError | ResponseError:
        if str(error).startswith(STREAM_IS_GONE):
            return self._connection.lost("the stream or its group is gone")
        return ReadOnlyError(str(error)) if str(error).startswith(DEMOTED) else error

    async def _fetch(self, after: bytes) -> list[_Entry]:
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
            raise self._group_lost(error) from None
        return self._entries_of(answer)

    def _entries_of(self, answer: object) -> list[_Entry]:
        """Returns the entries of an answer to XREADGROUP, and counts those that are new."""
        streams = cast("list[tuple[bytes, list[tuple[bytes, Any]]]]", answer or [])
        entries = [_Entry.of(*entry) for _, stream_entries in streams for entry in stream_entries]
        for entry in entries:
            if (number := _number(entry.entry_id)) > self._newest:
                self.added = self.added + 1
                self._newest = number
        self._read_last = _trajectories(entries)
        return entries

    async def _deliver(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            request = entry.request
            entry_id = entry.entry_id
            fault = entry.fault
            if request is None:
                # The data of a pending entry were deleted, if that was not before this receiver
                # began by another client.
                connection = self._connection
                if any(entry_id in sizes for sizes in self._entries.values()):
                    raise connection.lost(
                        f"entry {entry_id.decode()} was deleted by another client"
                    )
                logger.warning("redis at %s: entry %s is gone", connection.name, entry_id.decode())
                await connection.persistently(
                    partial(connection.client.xack, connection.stream, GROUP, entry_id)
                )
                continue
            trajectory_id = TrajectoryId(request.trajectory_id)
            delivery = None
            try:
                delivery = await opened(self._open_seal, request)
            except ProtocolError as error:
                fault = fault or str(error)
            if fault or delivery is None:
                name = self._connection.name
                logger.warning("redis at %s: %s is removed: %s", name, entry_id.decode(), fault)
                self._to_forget[entry_id] = entry.size
                self._wake_forgetter.set()
            elif trajectory_id in self._entries:
                self._entries[trajectory_id][entry_id] = entry.size
            elif entry_id not in self._to_forget:
                self._entries[trajectory_id] = {entry_id: entry.size}
                await self._deliveries.put(delivery)

    async def _forget(self) -> None:
        while True:
            await self._wake_forgetter.wait()
            self._wake_forgetter.clear()
            while self._to_forget:
                async with self._counting:
                    await self._connection.persistently(self._delete)

    async def _delete(self) -> None:
        """Acknowledges and deletes the entries of `_to_forget`, and counts their bytes as free.

        All of this is one transaction. If its answer is lost, it runs again: entries are gone then,
        and the next audit corrects the bytes.
        """
        connection = self._connection
        entries = dict(self._to_forget)
        async with connection.client.pipeline(transaction=True) as pipeline:
            pipeline.xack(connection.stream, GROUP, *entries)
            pipeline.xdel(connection.stream, *entries)
            pipeline.incrby(connection.bytes_key, -sum(entries.values()))
            await pipeline.execute()
        for entry_id in entries:
            del self._to_forget[entry_id]


@dataclass(frozen=True)
class _Entry:
    """An entry of the stream, and its delivery."""

    entry_id: bytes
    # The request, or None if another client deleted the entry.
    request: trajectory_pb2.DeliverRequest | None
    # The reason why the entry is no delivery; empty for one that is.
    fault: str = ""

    @classmethod
    def of(cls, entry_id: bytes, fields: dict[bytes, bytes] | None) -> _Entry:
        """Returns the entry whose fields Redis shows; a field without a delivery is a `fault`."""
        if not fields:
            return cls(entry_id, None)
        try:
            request = decode(trajectory_pb2.DeliverRequest, fields.get(DELIVERY, b""))
            check_known(request, f"entry {entry_id.decode()} of the queue")
        except ProtocolError as error:
            return cls(entry_id, trajectory_pb2.DeliverRequest(), str(error))
        return cls(entry_id, request)

    @property
    def size(self) -> int:
        return 0 if self.request is None else len(self.request.trajectory)


def _trajectories(entries: Iterable[_Entry]) -> list[TrajectoryId]:
    """Returns the ids of the entries that have a delivery."""
    return [TrajectoryId(entry.request.trajectory_id) for entry in entries if entry.request]


def _counts(inspected: Sequence[Any], connection: RedisConnection) -> tuple[int, int, Any]:
    """Returns Redis's counts: entries of the stream, all ever added, and the newest one's number.

    `inspected` has names and values in turn. Raises ConfigError if Redis is older than 7.0, which
    does not count the entries that were added.
    """
    names, values = inspected[::2], inspected[1::2]
    facts = dict(zip(names, values, strict=False))
    if b"entries-added" not in facts:
        raise ConfigError(
            f"redis at {connection.name} is older than 7.0 and does not count the entries that "
            "were added: the queue needs Redis or Valkey from 7.0 on"
        )
    return facts[b"length"], facts[b"entries-added"], _number(facts[b"last-generated-id"])


def _number(entry_id: bytes) -> tuple[int, int]:
    """Returns the two numbers of an entry's id; they rise with each entry."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)


@asynccontextmanager
async def receiver(
    run: ControlledRun,
    _: grpc.aio.Server,
    journal: Journal,
    history: RunHistory,
) -> AsyncIterator[RedisReceiver]:
    """Opens the receiver of a run's stream.

    The number of entries ever added to the stream is journaled; if it has fallen, Redis has lost
    data, and a warning says so.
    """
    url = redis_url_of(run.config.queue, "controller")
    seal = opener(run.progress.run_key)
    patience_s = run.config.controller.stall_timeout_s
    async with RedisReceiver(
        url, run.progress.run_id, seal, patience_s=patience_s
    ) as opened_receiver:
        last_added = history.queue_added
        if last_added is not None and (
            opened_receiver.is_new or opened_receiver.added < last_added
        ):
            run.events.warn("the queue lost what waited there; it is generated again")
        journal.append(kinds.QueueStart(added=opened_receiver.added))
        yield opened_receiver
