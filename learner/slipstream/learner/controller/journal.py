"""The journal of a run: what was leased and trained, and how it ended. Append-only, one writer.

Each line of `journal.log` is a CRC-32 in hexadecimal, a space and a JSON object; the batch of each
step is a file of its own. `sync` returns when everything appended before is on disk.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from pydantic import JsonValue
from slipstream.protocol.errors import ProtocolError
from slipstream.v1 import trainer_pb2

LOG_NAME = "journal.log"
BATCH_FOLDER = "batches"


class Journal:
    """The writer; a context manager. FileExistsError when the folder holds a journal already."""

    def __init__(self, folder: Path) -> None:
        (folder / BATCH_FOLDER).mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = (folder / LOG_NAME).open("xb")
        self._dirty = False

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sync()
        self._file.close()

    def append(self, kind: str, **fields: JsonValue) -> None:
        """Writes one record; it is durable after the next `sync`."""
        text = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        self._dirty = True

    def sync(self) -> None:
        """Makes all records durable."""
        if self._dirty:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._dirty = False

    def write_batch(self, batch: trainer_pb2.RecordedBatch) -> None:
        """Makes the batch of a step durable, file and record, before anyone trains it."""
        step = batch.header.step
        data = batch.SerializeToString(deterministic=True)
        path = batch_path(self._folder, step)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        _sync_folder(path.parent)
        self.append(
            "batch",
            step=step,
            batch_id=batch.header.batch_id,
            crc32=zlib.crc32(data),
            groups=list(dict.fromkeys(t.group_id for t in batch.trajectories)),
            trajectories=len(batch.trajectories),
        )
        self.sync()


def read_records(folder: Path) -> Iterator[dict[str, JsonValue]]:
    """All records in order, without a torn last line; ProtocolError for any other damage."""
    lines = (folder / LOG_NAME).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ProtocolError(f"{folder / LOG_NAME}: line {number} is damaged")
        yield json.loads(text)


def read_batch(folder: Path, step: int, crc32: int) -> trainer_pb2.RecordedBatch:
    """The recorded batch of a step; ProtocolError when it is not the one that the journal names."""
    data = batch_path(folder, step).read_bytes()
    if zlib.crc32(data) != crc32:
        raise ProtocolError(f"{batch_path(folder, step)} is damaged")
    return trainer_pb2.RecordedBatch.FromString(data)


def batch_path(folder: Path, step: int) -> Path:
    """Where the batch of `step` lies."""
    return folder / BATCH_FOLDER / f"step-{step:06d}.pb"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
