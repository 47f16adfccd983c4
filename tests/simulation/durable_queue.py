"""A queue that outlives the processes at its ends, in the place of the one in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.base import Delivery, EpochAmounts, Tally

if TYPE_CHECKING:
    from simulation.world import World


class DurableQueue:
    """The server of the queue; the classes of both ends are made by `sender` and `receiver`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries: dict[TrajectoryId, Delivery] = {}
        # Longest time of one reading.
        self.read_s = 0.002
        self.changed = asyncio.Event()

    def sender(self, url: str, run_id: str, max_bytes: int, **_: float) -> QueueSender:
        return QueueSender(self)

    def receiver(
        self, url: str, run_id: str, open_seal: Callable[..., bytes | None], **_: float
    ) -> Any:
        return QueueReceiver(self, open_seal)

    @property
    def num_bytes(self) -> int:
        return sum(len(entry.data) for entry in self.entries.values())


class QueueEnd:
    """Is entered and left like the ends of other queues, and has nothing to close."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return


class QueueSender(QueueEnd):
    """The end of a rollout server, which waits until an entry is stored."""

    def __init__(self, queue: DurableQueue) -> None:
        self._queue = queue
        self._random = queue.world.random
        self._sent, self.taken = EpochAmounts(), EpochAmounts()
        self._waiting: dict[TrajectoryId, None] = {}
        self._order = asyncio.Lock()

    @property
    def queued_bytes(self) -> int:
        return self._queue.num_bytes

    @property
    def undelivered(self) -> Sequence[TrajectoryId]:
        return list(self._waiting)

    async def put(
        self,
        trajectory_id: TrajectoryId,
        data: bytes,
        *,
        timeout_s: float,
        tokens: int = 0,
    ) -> None:
        if self._queue.world.lies_now("lost delivery"):
            self._sent.add(trajectory_id, tokens)
            self.taken.add(trajectory_id, tokens)
            self._queue.world.finished_episodes.lose(trajectory_id)
            return
        self._waiting[trajectory_id] = None
        try:
            async with self._order:
                await asyncio.sleep(self._random.uniform(0.0, 0.02))
                sent = self._sent.add(trajectory_id, tokens)
                entry = Delivery(trajectory_id, data, tokens, sent)
                self._queue.entries.setdefault(trajectory_id, entry)
                self._queue.changed.set()
                await asyncio.sleep(self._random.uniform(0.0, 0.02))
        finally:
            self._waiting.pop(trajectory_id, None)
        self.taken.add(trajectory_id, tokens)


class QueueReceiver(QueueEnd):
    """The controller's end: it reads all entries from the start, and forgets acknowledged ones."""

    # The queue never loses anything.
    is_new = False
    added = 0

    def __init__(
        self, queue: DurableQueue, open_seal: Callable[..., bytes | None]
    ) -> None:
        self._queue = queue
        self._open_seal = open_seal
        self.given = Tally()
        self.backlog = tuple(queue.entries)
        self._read: set[TrajectoryId] = set()

    async def waiting(self) -> Sequence[TrajectoryId]:
        return list(self._queue.entries)

    async def get(self) -> Delivery:
        while True:
            await asyncio.sleep(
                self._queue.world.random.uniform(0.0, self._queue.read_s)
            )
            for trajectory_id, entry in self._queue.entries.items():
                if trajectory_id not in self._read:
                    self._read.add(trajectory_id)
                    data = self._open_seal(trajectory_id, entry.data)
                    assert data is not None
                    self.given = self.given.plus(entry.tokens)
                    return Delivery(trajectory_id, data, entry.tokens, entry.sent)
            self._queue.changed.clear()
            await self._queue.changed.wait()

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        world = self._queue.world
        for trajectory_id in trajectory_ids:
            if self._queue.entries.pop(trajectory_id, None) is not None:
                world.acknowledged.setdefault(trajectory_id, world.disk.mark())
            self._read.discard(trajectory_id)
