"""Which trajectories an earlier controller has recorded."""

from __future__ import annotations

from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.protocol.types import GroupId, TrajectoryId


class EarlierIds:
    """Which trajectories the journal of an earlier controller holds: they need no other record."""

    def __init__(self, history: RunHistory, journal: Journal) -> None:
        self._ended, self._trained_in = history.ended, history.trained_in
        kept = journal.kept_batches() if history.batches else set()
        self._crc32 = {step: history.batches[step].crc32 for step in kept & set(history.batches)}
        self._journal = journal
        # What was read last: what comes again comes in the order of the batches.
        self._newest: tuple[int, frozenset[TrajectoryId]] = (-1, frozenset())

    def holds(self, group_id: GroupId, trajectory_id: TrajectoryId) -> bool:
        """Whether it ended, or is in a batch; reads the batch of its group when there is one."""
        if trajectory_id in self._ended:
            return True
        step = self._trained_in.get(group_id)
        if step is None:
            return False
        if not self._journal.has_batch(step):
            # A checkpoint covers it.
            return True
        if self._newest[0] != step:
            self._newest = step, self._read(step)
        return trajectory_id in self._newest[1]

    def _read(self, step: int) -> frozenset[TrajectoryId]:
        batch = self._journal.read_batch(step, self._crc32[step])
        return frozenset(trajectory_from_pb(t).trajectory_id for t in batch.trajectories)
