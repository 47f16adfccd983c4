"""From complete groups to a journaled batch.

The journal holds the whole batch before the trainer sees it; that record acknowledges its
trajectories.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook, sampled_tokens
from slipstream.learner.controller.records.ends import End
from slipstream.learner.controller.records.history import RecordedStep, RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import TokenLedger
from slipstream.learner.controller.records.timeline import version_of
from slipstream.learner.controller.tasks.environments import EnvironmentBook
from slipstream.protocol.codec import trajectory_from_pb, trajectory_to_pb, version_from_pb
from slipstream.protocol.errors import ProtocolError, RunFailed
from slipstream.protocol.queue.base import TrajectoryReceiver
from slipstream.protocol.staleness import lag
from slipstream.protocol.types import GroupId, PolicyVersion, Trajectory
from slipstream.v1 import trainer_pb2

# Trajectories of a batch travel in messages of about this size.
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Batch:
    """The groups of one step, whole, in the order of their leases."""

    # The version that it starts from, as in the journal and the protocol.
    step: int
    batch_id: str
    groups: tuple[Group, ...]

    @property
    def version(self) -> int:
        """The version that the step makes: its number in all that people read."""
        return self.step + 1

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group, by member."""
        return [trajectory for group in self.groups for trajectory in group.in_order()]


@dataclass(frozen=True)
class Trained:
    """What became of a batch that the trainer was given."""

    batch: Batch
    # The version that its weights are.
    version: PolicyVersion
    # Whether the journal held the step already.
    again: bool


class BatchFormer:
    """Takes batches from the lease book and makes them durable; has them again from the journal."""

    def __init__(
        self,
        book: LeaseBook,
        environments: EnvironmentBook,
        journal: Journal,
        ledger: TokenLedger,
        receiver: TrajectoryReceiver,
        tasks: asyncio.TaskGroup,
        *,
        keep_batches: bool,
    ) -> None:
        self._book = book
        self._environments = environments
        self._journal = journal
        self._ledger = ledger
        self._receiver = receiver
        self._tasks = tasks
        self._keep_batches = keep_batches
        # The batch that is being written: a call that breaks off must not leave half of it.
        self._forming: asyncio.Task[Batch | RunFailed] | None = None
        # Checksum of the batch of each step that is kept.
        self._crc32: dict[int, int] = {}
        self._steps: dict[int, RecordedStep] = {}
        self._newest_incarnation = 0
        # The step of the newest checkpoint: the one after it makes its older batches needless.
        self._covered_step = 0
        # Older batches were removed by this controller.
        self._first_kept = 0
        # The one that the trainer has.
        self.training: Batch | None = None
        # Its last report, and the version that it was answered: the answer may be lost on the way.
        self._reported: tuple[trainer_pb2.StepReport, PolicyVersion] | None = None

    def restore(self, history: RunHistory) -> None:
        """Goes on where the journal ends."""
        kept = self._journal.kept_batches()
        first = min(kept, default=history.next_step)
        self._crc32 = {step: b.crc32 for step, b in history.batches.items() if step in kept}
        # A trainer may go back to the version before the first of them.
        self._steps = {step: s for step, s in history.steps.items() if step >= first - 1}
        self._newest_incarnation = history.incarnation
        self._covered_step = history.checkpoint.step

    def trainer_joined(self) -> None:
        """Another one: it has no batch, and has reported nothing."""
        self.training = self._reported = None

    def first_missing(self, step: int) -> Path | None:
        """The first batch from `step` on that is not there any more; None: all are."""
        steps = range(step, self._book.step)
        return next((self._journal.path(s) for s in steps if not self._journal.has_batch(s)), None)

    def identify(self, version: PolicyVersion, digest: str) -> PolicyVersion:
        """The version as which the run knows weights of the trainer."""
        recorded = self._steps.get(version.step - 1)
        return version_of(
            version.step,
            digest,
            recorded,
            trainer=version.incarnation,
            newest=self._newest_incarnation,
        )

    async def recorded(self, step: int) -> Batch:
        """The batch of a step that the journal holds."""
        if self._forming is not None:
            await self.form()
        if self.training is None or self.training.step != step:
            crc32 = self._crc32[step]
            message = await asyncio.to_thread(self._journal.read_batch, step, crc32)
            self.training = from_record(message)
        return self.training

    async def form(self) -> Batch | None:
        """The next batch, durable and acknowledged; None while the rules do not allow one.

        RunFailed when the journal cannot take it.
        """
        if self._forming is None:
            step = self._book.step
            groups = self._book.take_batch()
            if groups is None:
                return None
            batch = Batch(step, f"b{step:06d}", tuple(groups))
            self._forming = self._tasks.create_task(self._write(batch))
        written = await asyncio.shield(self._forming)
        self._forming = None
        if isinstance(written, RunFailed):
            raise written
        self.training = written
        return written

    async def _write(self, batch: Batch) -> Batch | RunFailed:
        for group in batch.groups:
            self._environments.group_ended(group.environment, cause=None)
        try:
            self._crc32[batch.step] = await asyncio.to_thread(self._write_record, batch)
        except RunFailed as failure:
            # The task belongs to the run, which ends in order.
            return failure
        await self._receiver.acknowledge(t.trajectory_id for t in batch.trajectories)
        return batch

    def _write_record(self, batch: Batch) -> int:
        """Encodes a batch and makes it durable; off the loop, as both take long."""
        return self._journal.write_batch(record(batch), tokens_by_server(batch.trajectories))

    def answered(self, report: trainer_pb2.StepReport) -> PolicyVersion | None:
        """What the same report was answered before; None when it is the first one of its batch.

        ProtocolError when the trainer was not given that batch, or has reported it differently.
        """
        if self.training is not None and _batch_of(self.training) == _batch_of(report):
            return None
        if self._reported is not None:
            earlier, version = self._reported
            if _what(earlier) == _what(report):
                return version
            if earlier.step == report.step:
                raise ProtocolError(
                    f"step {report.step + 1} was reported as {_describe(earlier)}, "
                    f"and now as {_describe(report)}"
                )
        given = "none"
        if self.training is not None:
            given = f"{self.training.batch_id} of step {self.training.version}"
        raise ProtocolError(
            f"a report of batch {report.batch_id} of step {report.step + 1}, "
            f"but the batch that the trainer was given is {given}"
        )

    def trained(self, report: trainer_pb2.StepReport) -> Trained:
        """The trainer has made a version from the batch that it was given: see `answered`.

        The caller waits until that is `durable` before it tells the trainer.
        """
        batch, self.training = self.training, None
        assert batch is not None
        assert _batch_of(batch) == _batch_of(report)
        earlier = self._steps.get(batch.step)
        version = self.identify(version_from_pb(report.version), report.weight_digest.hex())
        if earlier is None or earlier.version != version:
            self._newest_incarnation = max(self._newest_incarnation, version.incarnation)
            self._steps[batch.step] = RecordedStep(version, report.weight_digest.hex())
            self._journal.append(
                "step",
                step=report.step,
                version=list(version),
                digest=report.weight_digest.hex(),
                lags=[list(pair) for pair in sorted(token_lags(batch).items())],
                several=with_several_versions(batch),
            )
        if earlier is None:
            self._ledger.end(End.TRAINED, sampled_tokens(batch.trajectories))
        self._reported = report, version
        return Trained(batch, version, again=earlier is not None)

    async def durable(self) -> None:
        """Returns when all that was journaled until now is on the disk."""
        await self._journal.durable()

    async def saved(self, report: trainer_pb2.CheckpointReport) -> None:
        """A checkpoint covers the batches of all steps before its version."""
        step = report.version.step
        self._journal.append(
            "checkpoint",
            version=[report.version.incarnation, step],
            digest=report.weight_digest.hex(),
            path=report.path,
        )
        await self.durable()
        covered_step, self._covered_step = self._covered_step, step
        # Those since the checkpoint before it stay: it may have to be gone back to. A report that
        # is repeated, or of a trainer that went back to an older checkpoint, covers nothing new.
        if not self._keep_batches and step > covered_step:
            for covered in range(self._first_kept, covered_step):
                self._journal.remove_batch(covered)
                self._crc32.pop(covered, None)
                self._steps.pop(covered - 1, None)
            self._first_kept = covered_step


def _batch_of(said: Batch | trainer_pb2.StepReport) -> tuple[str, int]:
    return said.batch_id, said.step


def _what(report: trainer_pb2.StepReport) -> tuple[object, ...]:
    """Two reports in which it is the same are one report that was sent twice."""
    version = version_from_pb(report.version)
    return *_batch_of(report), version, report.weight_digest


def _describe(report: trainer_pb2.StepReport) -> str:
    version, digest = version_from_pb(report.version), report.weight_digest.hex()
    return f"version {version} with digest {digest} from batch {report.batch_id}"


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


def from_record(message: trainer_pb2.RecordedBatch) -> Batch:
    """Inverse of `record`."""
    groups: dict[GroupId, Group] = {}
    for trajectory in map(trajectory_from_pb, message.trajectories):
        group = groups.get(trajectory.group_id)
        if group is None:
            group = groups[trajectory.group_id] = Group(
                group_id=trajectory.group_id,
                environment=trajectory.environment,
                task_index=trajectory.task_index,
                seed=trajectory.seed,
                purpose=trajectory.purpose,
                size=0,
                deadline_step=message.header.step,
                holder=None,
            )
        group.finished[trajectory.member] = trajectory
        group.size += 1
    return Batch(message.header.step, message.header.batch_id, tuple(groups.values()))


def tokens_by_server(trajectories: Iterable[Trajectory]) -> list[tuple[str, int, int]]:
    """Name, epoch and sampled tokens of each server epoch."""
    tokens: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        key = (trajectory.server_id, trajectory.server_epoch)
        tokens[key] += trajectory.num_sampled_tokens
    return [(name, epoch, number) for (name, epoch), number in sorted(tokens.items())]


def token_lags(batch: Batch) -> Counter[int]:
    """Number of the sampled tokens of each lag."""
    lags: Counter[int] = Counter()
    for trajectory in batch.trajectories:
        for span in trajectory.version_spans:
            lags[lag(batch.step, span.version.step)] += span.length
    return lags


def with_several_versions(batch: Batch) -> int:
    """Number of trajectories that more than one version sampled."""
    return sum(
        len({span.version for span in trajectory.version_spans}) > 1
        for trajectory in batch.trajectories
    )


def chunks(batch: Batch) -> list[trainer_pb2.TrajectoryChunk]:
    """The trajectories in messages of bounded size."""
    parts = [trainer_pb2.TrajectoryChunk()]
    size = 0
    for trajectory in batch.trajectories:
        message = trajectory_to_pb(trajectory)
        if size + message.ByteSize() > CHUNK_BYTES:
            parts.append(trainer_pb2.TrajectoryChunk())
            size = 0
        parts[-1].trajectories.append(message)
        size += message.ByteSize()
    return parts
