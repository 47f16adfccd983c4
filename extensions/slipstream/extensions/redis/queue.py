"""Sends trajectories over a Redis Stream; Redis keeps stored trajectories in its files.

Consumes: trajectories, by `put`. Produces: stream entries, whose bytes are counted in the same
transaction. Waits for: free bytes, by polling. Unblocked by: acknowledgements, which are counted
too.

The server is Redis or Valkey from 7 on. It must fsync every write and never evict: the receiver
checks this, and warns if the server does not show its settings.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio
import redis.asyncio
from redis.exceptions import WatchError
from slipstream.core.backoff import Backoff
from slipstream.core.errors import QueueError, TrajectoryQueueFull
from slipstream.core.settings.config import Config
from slipstream.core.types import TrajectoryId
from slipstream.extensions.redis.connection import (
    DELIVERY,
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    RedisConnection,
)
from slipstream.protocol.access.security import redis_url_of
from slipstream.protocol.queue.base import EpochAmounts, check_fits, queue_full
from slipstream.v1 import trajectory_pb2

MAX_ENTRIES_PER_WRITE = 64
WATCH_S = 0.5


@dataclass(eq=False)
class _Put:
    """A trajectory that waits to be stored, and the future of its `put`."""

    trajectory_id: TrajectoryId
    data: bytes
    tokens: int
    stored: asyncio.Future[None]


class RedisSender:
    """The rollout server's side of the queue; `put` returns when the trajectory is on Redis's disk.

    Trajectories that wait at the same time are written together. If Redis stays unreachable or came
    back empty, waiting `put`s fail, and the `async with` block ends with an ExceptionGroup of a
    QueueError. At the end of the block waiting `put`s fail too, and stored trajectories stay in
    Redis. A receiver must have opened the queue first.
    """

    def __init__(
        self, url: str, run_id: str, max_bytes: int, *, patience_s: float | None = None
    ) -> None:
        """Limits the unacknowledged bytes of all senders of the run to `max_bytes`."""
        self._connection = RedisConnection(url, run_id, patience_s)
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._waiting: deque[_Put] = deque()
        self._sent, self.taken = EpochAmounts(), EpochAmounts()
        self._wake_writer = asyncio.Event()
        self._executing = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = True

    async def __aenter__(self) -> Self:
        try:
            await self._connection.persistently(self._look)
        except BaseException:
            await self._connection.client.aclose()
            raise
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks = [group.create_task(self._write()), group.create_task(self._watch())]
        self._closed = False
        return self

    async def __aexit__(self, *raised: Any) -> None:  # noqa: ANN401 - passed on
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._fail(QueueError("the sender is closed"))
        async with contextlib.aclosing(self._connection.client):
            await self._stack.__aexit__(*raised)

    @property
    def queued_bytes(self) -> int:
        """Number of bytes of all senders that wait in Redis, at most half a second old."""
        return max(self._used_bytes, 0)

    @property
    def undelivered(self) -> Sequence[TrajectoryId]:
        return [place.trajectory_id for place in self._waiting]

    async def put(
        self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float, tokens: int = 0
    ) -> None:
        """Stores a trajectory on Redis's disk; raises TrajectoryQueueFull if it is away, too."""
        if self._closed:
            raise QueueError("the sender is closed")
        check_fits(len(data), self._max_bytes)
        place = _Put(trajectory_id, data, tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._wake_writer.set()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(place.stored)
        except TimeoutError:
            # The trajectory may be in a transaction at this moment.
            async with self._executing:
                if not place.stored.done():
                    connection = self._connection
                    num_bytes = len(data)
                    if connection.trouble is not None:
                        # `_write` ends the sender when Redis stays away.
                        away = connection.away(timeout_s, connection.trouble)
                        raise TrajectoryQueueFull(str(away)) from None
                    if self.queued_bytes + num_bytes <= self._max_bytes:
                        # The transaction has no answer yet, or room came at the last moment.
                        raise TrajectoryQueueFull(
                            f"redis at {connection.name} has room for {num_bytes} bytes and did "
                            f"not store them within {timeout_s:g} s"
                        ) from None
                    used_bytes = self.queued_bytes
                    raise queue_full(num_bytes, timeout_s, used_bytes, self._max_bytes) from None
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(place)
        self.taken.add(trajectory_id, tokens)

    def _fail(self, error: QueueError) -> None:
        for place in self._waiting:
            if not place.stored.done():
                place.stored.set_exception(error)

    async def _write(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        try:
            while True:
                await self._wake_writer.wait()
                self._wake_writer.clear()
                while self._waiting:
                    if await self._connection.persistently(self._add):
                        backoff.reset()
                    else:
                        await asyncio.sleep(backoff.take_s())
        except QueueError as error:
            self._fail(error)
            raise

    async def _add(self) -> bool:
        """Stores waiting trajectories that fit, in order; returns False if none fits now."""
        connection = self._connection
        async with connection.client.pipeline(transaction=True) as pipeline:
            # A different sender may take the room that is read here.
            await pipeline.watch(connection.bytes_key)
            used_bytes = self._used_bytes = await self._look(pipeline)
            async with self._executing:
                batch: list[_Put] = []
                sent = EpochAmounts(self._sent)
                pipeline.multi()  # type: ignore[no-untyped-call]
                for place in itertools.islice(self._waiting, MAX_ENTRIES_PER_WRITE):
                    if used_bytes + len(place.data) > self._max_bytes:
                        break
                    batch.append(place)
                    used_bytes += len(place.data)
                    request = trajectory_pb2.DeliverRequest(
                        trajectory=place.data,
                        trajectory_id=place.trajectory_id,
                        tokens=place.tokens,
                        sent=sent.add(place.trajectory_id, place.tokens).to_pb(),
                    )
                    fields: Any = {DELIVERY: request.SerializeToString()}
                    pipeline.xadd(connection.stream, fields, nomkstream=True)
                if not batch:
                    return False
                pipeline.incrby(connection.bytes_key, used_bytes - self._used_bytes)
                try:
                    *entry_ids, self._used_bytes = await pipeline.execute()
                except WatchError:
                    # A second sender was faster, or the connection broke: the next attempt tells.
                    return True
                if None in entry_ids:
                    raise connection.lost("the stream is gone")
                self._sent = sent
                for place in batch:
                    if not place.stored.done():
                        place.stored.set_result(None)
                    with contextlib.suppress(ValueError):
                        self._waiting.remove(place)
        return True

    async def _watch(self) -> None:
        """Updates `queued_bytes` while it is not 0."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.queued_bytes:
                await self._connection.persistently(self._look)

    async def _look(self, reader: redis.asyncio.Redis | None = None) -> int:
        """Returns the bytes that wait, read by the client `reader` if given, and notes them."""
        connection = self._connection
        stored = await (reader or connection.client).get(connection.bytes_key)
        self._used_bytes = connection.used_bytes(stored)
        return self._used_bytes


def sender(
    config: Config,
    _channel: grpc.aio.Channel,
    _metadata: Sequence[tuple[str, str]],
    run_id: str,
) -> RedisSender:
    """Returns the sender of a rollout server, which shares the run's stream with all others."""
    url = redis_url_of(config.queue, "rollout_server")
    patience_s = config.controller.stall_timeout_s
    return RedisSender(url, run_id, config.queue.max_bytes, patience_s=patience_s)
