"""The end of each trajectory: in the ledger, in the journal, and then acknowledged.

Consumes: ends. Produces: journal records, acknowledgements. Waits for: a noted end, the disk.
Unblocked by: `end`, `acknowledge`, the disk. Many ends are made durable at a time.
"""

import asyncio

from slipstream.core.types import Trajectory, TrajectoryId
from slipstream.learner.controller.records.history import TrajectoryEnd
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import TokenLedger
from slipstream.protocol.queue.base import TrajectoryReceiver

FLUSH_S = 0.05


class Endings:
    """Ends all trajectories that do not end in a batch."""

    def __init__(self, journal: Journal, ledger: TokenLedger, receiver: TrajectoryReceiver) -> None:
        self._journal, self._ledger, self._receiver = journal, ledger, receiver
        self._ended: list[TrajectoryId] = []
        self._flush_wanted = asyncio.Event()

    async def flush(self) -> None:
        """Makes ends durable and acknowledges them, many at a time, until the task is cancelled."""
        while True:
            await self._flush_wanted.wait()
            self._flush_wanted.clear()
            ended, self._ended = self._ended, []
            await self._journal.durable()
            await self._receiver.acknowledge(ended)
            await asyncio.sleep(FLUSH_S)

    def end(self, trajectory: Trajectory, end: TrajectoryEnd, cause: str) -> None:
        """Records the end of a trajectory in ledger and journal, and acknowledges it."""
        self._ledger.end(end, trajectory.num_sampled_tokens)
        self._journal.append(
            "end",
            id=trajectory.trajectory_id,
            end=end.value,
            cause=cause,
            tokens=trajectory.num_sampled_tokens,
            server=trajectory.server_id,
            epoch=trajectory.server_epoch,
        )
        self.acknowledge(trajectory.trajectory_id)

    def acknowledge(self, trajectory_id: TrajectoryId) -> None:
        """Acknowledges a trajectory to the queue after the next flush of the journal."""
        self._ended.append(trajectory_id)
        self._flush_wanted.set()

    def flush_soon(self) -> None:
        """Lets `flush` make all records so far durable, with those of the next moment."""
        self._flush_wanted.set()
