"""Which batches of the journal stay, and which are covered by a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
                journal.write_batch(trainer_pb2.RecordedBatch(header=header), [])
            books = books_of(run_of(), journal=journal)
            former = BatchFormer(books, tasks, keep_batches=False)
            for version in versions:
                await former.saved(saved(version))
            return [step for step in range(10) if journal.has_batch(step)]


async def test_batches_since_the_checkpoint_before_the_newest_stay(tmp_path: Path) -> None:
    assert await kept_after(tmp_path, 3, 6) == [3, 4, 5, 6, 7, 8, 9]


async def test_a_checkpoint_that_is_reported_twice_covers_no_more_than_once(
    tmp_path: Path,
) -> None:
    assert await kept_after(tmp_path, 3, 6, 6) == [3, 4, 5, 6, 7, 8, 9]


async def test_a_trainer_that_went_back_keeps_the_batches_that_it_must_train_again(
    tmp_path: Path,
) -> None:
    assert await kept_after(tmp_path, 2, 8, 5) == [2, 3, 4, 5, 6, 7, 8, 9]
