"""Batch files in one piece, for tests that look at them or change them."""

from pathlib import Path

from slipstream.learner.controller.records.batch_files import (
    BatchContents,
    StoredBatch,
    write_batch_file,
)
from slipstream.learner.controller.records.journal import batch_path
from slipstream.v1 import trainer_pb2


def in_one_message(batch: BatchContents) -> trainer_pb2.RecordedBatch:
    """All of a batch at once; a file is read to its end."""
    return trainer_pb2.RecordedBatch(
        header=batch.header, trajectories=batch.trajectories, passes=batch.passes
    )


def stored_batch(journal: Path, record: dict) -> trainer_pb2.RecordedBatch:
    """The batch of a journal's record."""
    attempt = int(record["batch_id"].partition("-")[2] or 0)
    path = batch_path(journal, record["step"], attempt)
    return in_one_message(StoredBatch(path, record["crc32"]))


def write_stored(path: Path, batch: BatchContents) -> int:
    """Writes a batch file in place of any other; its CRC-32."""
    with path.open("wb") as file:
        return write_batch_file(file, batch, lambda _: None).crc32
