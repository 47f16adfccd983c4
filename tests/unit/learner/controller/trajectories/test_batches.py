"""Which batches of the journal stay, which are covered by a checkpoint, and which are missing."""

import asyncio
import threading
from pathlib import Path

from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.trajectories.batches import BatchFormer
from slipstream.v1 import trainer_pb2, trajectory_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of


def saved(version: int) -> trainer_pb2.CheckpointReport:
    return trainer_pb2.CheckpointReport(version=trajectory_pb2.PolicyVersion(step=version))


async def kept_after(folder: Path, *versions: int) -> list[int]:
    """Steps, of ten, whose batches are kept after checkpoints of `versions`."""
    async with asyncio.TaskGroup() as tasks:
        with Journal(folder) as journal:
            for step in range(10):
                header = trainer_pb2.BatchHeader(step=step, batch_id=f"b{step}")
                journal.write_batch(trainer_pb2.RecordedBatch(header=header))
            books = books_of(run_of(), journal=journal)
            former = BatchFormer(books, tasks, keep_batches=False)
            for version in versions:
                await former.saved(saved(version))
            return [step for step in range(10) if journal.has_batch(step)]


async def test_batches_since_the_checkpoint_before_the_newest_stay(tmp_path: Path) -> None:
    assert await kept_after(tmp_path, 3, 6) == [3, 4, 5, 6, 7, 8, 9]


async def test_a_checkpoint_that_is_reported_twice_covers_no_more_than_once(tmp_path: Path) -> None:
    assert await kept_after(tmp_path, 3, 6, 6) == [3, 4, 5, 6, 7, 8, 9]


async def test_a_trainer_that_went_back_keeps_the_batches_that_it_must_train_again(tmp_path):
    assert await kept_after(tmp_path, 2, 8, 5) == [2, 3, 4, 5, 6, 7, 8, 9]


class SlowJournal(Journal):
    """A journal whose disk holds a batch back until `disk` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.disk = threading.Event()

    def write_batch(self, batch: trainer_pb2.RecordedBatch) -> int:
        assert self.disk.wait(60)
        return super().write_batch(batch)


class EmptyBatches(LeaseBook):
    """A lease book whose every batch is complete, with no group."""

    def take_batch(self) -> list[Group]:
        self.step += 1
        return []


async def test_a_batch_that_is_being_written_is_not_missing(tmp_path: Path) -> None:
    run = run_of()
    book = EmptyBatches(
        groups_per_step=1, group_size=1, max_staleness=1, num_steps=9, attempts_per_lease=1
    )
    async with asyncio.TaskGroup() as tasks:
        with SlowJournal(tmp_path) as journal:
            books = books_of(run, journal=journal, leases=book)
            former = BatchFormer(books, tasks, keep_batches=True)
            asked = asyncio.create_task(former.form())
            await asyncio.sleep(0)
            # A trainer that starts again comes while the batch of the one before is written.
            asked.cancel()
            assert book.step == 1
            assert former.first_missing(0) is None
            given = asyncio.create_task(former.recorded(0))
            await asyncio.sleep(0.05)
            assert not given.done()
            journal.disk.set()
            assert (await given).step == 0
            journal.path(0).unlink()
            assert former.first_missing(0) == journal.path(0)
