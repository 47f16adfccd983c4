"""The forms in which a batch goes to the journal and to the trainer."""

from __future__ import annotations

import pytest
from slipstream.learner.controller.trajectories.batch import (
    FormedBatch,
    chunks,
    from_record,
    header,
)
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2
from support.fakes.fake_controller import make_batch


@pytest.fixture
def batch() -> FormedBatch:
    made = make_batch(0, num_groups=3, group_size=2, vocab_size=8, max_tokens=9)
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=0, batch_id="b0"),
        trajectories=[trajectory_to_pb(trajectory) for trajectory in made.trajectories],
    )
    return from_record(message)


def test_trainer_gets_the_messages_that_the_journal_keeps(batch: FormedBatch) -> None:
    (chunk,) = chunks(batch)
    assert list(chunk.trajectories) == list(batch.record.trajectories)
    assert batch.record is batch.record


def test_a_group_without_some_of_its_members_is_told_as_it_is(batch: FormedBatch) -> None:
    del batch.groups[1].finished[0]
    batch.groups[1].failed.add(0)
    read = from_record(batch.record)
    assert (header(read).num_groups, header(read).num_trajectories) == (3, 5)
    assert header(read) == header(batch)
    assert all(group.is_complete and not group.missing for group in read.groups)
    assert read.record == batch.record


@pytest.mark.parametrize("messages_each", [0.5, 1, 2.5])
def test_chunks_are_within_their_bytes_and_never_empty(
    batch: FormedBatch, messages_each: float
) -> None:
    limit = int(messages_each * max(m.ByteSize() for m in batch.record.trajectories))
    parts = [list(chunk.trajectories) for chunk in chunks(batch, chunk_bytes=limit)]
    assert [message for part in parts for message in part] == list(batch.record.trajectories)
    assert all(part for part in parts)
    assert all(len(part) == 1 or sum(m.ByteSize() for m in part) <= limit for part in parts)
