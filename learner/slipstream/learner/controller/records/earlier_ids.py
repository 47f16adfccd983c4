"""The trajectories that the journal of an earlier controller holds."""

from __future__ import annotations

from slipstream.core.types import GroupId, TrajectoryId
from slipstream.learner.controller.records.history import RecordedBatch, RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.protocol.codec import trajectory_from_pb


class EarlierIds:
    """Knows the trajectories that an earlier controller has journaled."""

    def __init__(self, history: RunHistory, journal: Journal) -> None:
        self._ended, self._trained_in = history.ended, history.trained_in
        kept = journal.kept_batches() if history.batches else set()
        self._kept = {step: b for step, b in history.batches.items() if (step, b.attempt) in kept}
        self._journal = journal
        # Step and ids of the batch read last: redelivered trajectories come in batch order.
        self._newest: tuple[int, frozenset[TrajectoryId]] = (-1, frozenset())

    def holds(self, group_id: GroupId, trajectory_id: TrajectoryId) -> bool:
        """Whether the trajectory has ended or is in a batch; reads the file of that batch."""
        if trajectory_id in self._ended:
            return True
        step = self._trained_in.get(group_id)
        if step is None:
            return False
        batch = self._kept.get(step)
        if batch is None or not self._journal.has_batch(step, batch.attempt):
            # The file was removed because a checkpoint covers the batch.
            return True
        if self._newest[0] != step:
            self._newest = step, self._read(batch)
        return trajectory_id in self._newest[1]

    def _read(self, recorded: RecordedBatch) -> frozenset[TrajectoryId]:
        batch = self._journal.read_batch(recorded.step, recorded.crc32, recorded.attempt)
        return frozenset(trajectory_from_pb(t).trajectory_id for t in batch.trajectories)
