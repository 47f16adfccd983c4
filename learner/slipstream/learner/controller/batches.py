"""From complete groups to a journaled batch.

The journal holds the whole batch before the trainer sees it; that record acknowledges its
trajectories.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slipstream.learner.controller.environments import EnvironmentBook
from slipstream.learner.controller.journal import Journal
from slipstream.learner.controller.leases import Group, LeaseBook, sampled_tokens
from slipstream.learner.controller.ledger import End, TokenLedger
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.protocol.queue.base import TrajectoryReceiver
from slipstream.protocol.types import Trajectory
from slipstream.v1 import trainer_pb2


@dataclass(frozen=True)
class Batch:
    """The groups of one step, whole, in the order of their leases."""

    step: int
    batch_id: str
    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group, by member."""
        return [trajectory for group in self.groups for trajectory in group.in_order()]


class BatchFormer:
    """Takes batches from the lease book and makes them durable."""

    def __init__(
        self,
        book: LeaseBook,
        environments: EnvironmentBook,
        journal: Journal,
        ledger: TokenLedger,
        receiver: TrajectoryReceiver,
    ) -> None:
        self._book = book
        self._environments = environments
        self._journal = journal
        self._ledger = ledger
        self._receiver = receiver
        self.training: Batch | None = None

    async def form(self) -> Batch | None:
        """The next batch, durable and acknowledged; None while the rules do not allow one."""
        step = self._book.step
        groups = self._book.take_batch()
        if groups is None:
            return None
        batch = Batch(step, f"b{step:06d}", tuple(groups))
        for group in groups:
            self._environments.group_ended(group.environment, cause=None)
        await asyncio.to_thread(self._journal.write_batch, record(batch))
        await self._receiver.acknowledge(t.trajectory_id for t in batch.trajectories)
        self.training = batch
        return batch

    def trained(self, report: trainer_pb2.StepReport) -> Batch:
        """The trainer has made the next version from the batch."""
        batch, self.training = self.training, None
        assert batch is not None
        assert (batch.step, batch.batch_id) == (report.step, report.batch_id)
        self._journal.append(
            "step",
            step=report.step,
            version=[report.version.incarnation, report.version.step],
            digest=report.weight_digest.hex(),
        )
        self._journal.sync()
        self._ledger.end(End.TRAINED, sampled_tokens(batch.trajectories))
        return batch

    def saved(self, report: trainer_pb2.CheckpointReport) -> None:
        """A checkpoint covers the batches of all steps before its version."""
        self._journal.append(
            "checkpoint",
            version=[report.version.incarnation, report.version.step],
            digest=report.weight_digest.hex(),
            path=report.path,
        )
        self._journal.sync()


def record(batch: Batch) -> trainer_pb2.RecordedBatch:
    """The batch as the journal keeps it."""
    trajectories = [trajectory_to_pb(trajectory) for trajectory in batch.trajectories]
    return trainer_pb2.RecordedBatch(header=header(batch), trajectories=trajectories)


def header(batch: Batch) -> trainer_pb2.BatchHeader:
    """What the trainer reads first."""
    return trainer_pb2.BatchHeader(
        step=batch.step,
        batch_id=batch.batch_id,
        num_groups=len(batch.groups),
        num_trajectories=sum(group.size for group in batch.groups),
    )
