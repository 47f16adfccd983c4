"""The file of a batch: a stream of bounded records, read and written one record at a time.

    "slipstream batch 2", a line    the name and number of the format
    head, BatchFileStart            the release that wrote the file, and the batch's header
    head, Trajectory or Pass        as many as the batch has, in their order
    head, BatchFileEnd              how many records there are; a file without it was torn

A head is little endian: the kind of the record in a byte, the length of the message in four bytes,
and the CRC-32 of the message in four bytes. The journal's record of a batch holds the CRC-32 of the
whole file. An older release wrote one `RecordedBatch` message in place of all this, which protobuf
can read back only below 2 GiB; such a file is still read.
"""

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message
from slipstream.core.errors import ProtocolError, RunFailed
from slipstream.core.machine.files import open_regular, read_regular
from slipstream.learner.controller.records.history import REMEDY
from slipstream.protocol.access.security import MAX_MESSAGE_BYTES
from slipstream.protocol.bounds import check_bounds, check_known
from slipstream.protocol.release import RELEASE, unknown_fact
from slipstream.v1 import trainer_pb2, trajectory_pb2

# Part of a batch, in its file and in the messages to the trainer.
Content: TypeAlias = trajectory_pb2.Trajectory | trainer_pb2.Pass

M = TypeVar("M", bound=Message)

NAME = b"slipstream batch "
MAGIC = NAME + b"2\n"
_FORMAT = re.compile(re.escape(NAME) + rb"[0-9]+\n?")
# Kind of the record, length and CRC-32 of its message.
HEAD = struct.Struct("<BII")
# A record must fit a message to the trainer, beside the few bytes that wrap it there.
MAX_RECORD_BYTES = MAX_MESSAGE_BYTES - 1024
_KINDS: dict[int, type[Message]] = {
    1: trainer_pb2.BatchFileStart,
    2: trajectory_pb2.Trajectory,
    3: trainer_pb2.Pass,
    4: trainer_pb2.BatchFileEnd,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


class BatchContents(Protocol):
    """A batch as messages; `trajectories` and `passes` may be made while they are read."""

    @property
    def header(self) -> trainer_pb2.BatchHeader:
        """The step and the id of the batch, and what a client orders in place of groups."""

    @property
    def trajectories(self) -> Iterable[trajectory_pb2.Trajectory]:
        """The trajectories, in the order of their groups."""

    @property
    def passes(self) -> Iterable[trainer_pb2.Pass]:
        """The passes whose gradients a client's step takes."""


@dataclass(frozen=True)
class WrittenFile:
    """Facts of a file by which a reader knows it again."""

    crc32: int
    num_bytes: int


def write_batch_file(
    file: BinaryIO, batch: BatchContents, note: Callable[[trajectory_pb2.Trajectory], None]
) -> WrittenFile:
    """Writes a batch record by record, and calls `note` for each trajectory.

    Raises RunFailed for a record that no reader would take, and OSError if the disk fails.
    """
    crc32 = 0
    num_bytes = 0
    num_records = 0

    def write(data: bytes) -> None:
        nonlocal crc32, num_bytes
        file.write(data)
        crc32 = zlib.crc32(data, crc32)
        num_bytes += len(data)

    def write_record(message: Message) -> None:
        nonlocal num_records
        data = message.SerializeToString(deterministic=True)
        problem = _unreadable(message, len(data))
        if problem:
            raise RunFailed(
                f"batch {batch.header.batch_id} of step {batch.header.step + 1} is not trained, "
                f"because nobody could read it again: {_named(message)} {problem}"
            )
        write(HEAD.pack(_NUMBERS[type(message)], len(data), zlib.crc32(data)))
        write(data)
        num_records += 1

    write(MAGIC)
    write_record(trainer_pb2.BatchFileStart(release=RELEASE, header=batch.header))
    for trajectory in batch.trajectories:
        note(trajectory)
        write_record(trajectory)
    for client_pass in batch.passes:
        write_record(client_pass)
    write_record(trainer_pb2.BatchFileEnd(num_records=num_records))
    return WrittenFile(crc32, num_bytes)


def _unreadable(message: Message, num_bytes: int) -> str:
    """Returns why `StoredBatch` would refuse a record, or "" if it would not."""
    if num_bytes > MAX_RECORD_BYTES:
        return f"has {num_bytes} bytes, more than the {MAX_RECORD_BYTES} of a record"
    try:
        check_bounds(message)
    except ProtocolError as error:
        return f"breaks a bound: {error}"
    return ""


def _named(message: Message) -> str:
    if isinstance(message, trajectory_pb2.Trajectory):
        return f"member {message.member} of group {message.group_id}"
    if isinstance(message, trainer_pb2.Pass):
        return f"pass {message.id}"
    return f"its {message.DESCRIPTOR.name}"


class StoredBatch:
    """The batch in a file, as `BatchContents`; each use of `trajectories` reads the file anew.

    Whoever reads to the end knows that the whole file is as it was written. Every method raises
    ProtocolError for a file that is missing, damaged, torn or another than the one with this
    CRC-32, and for one with a fact of another release.
    """

    def __init__(self, path: Path, crc32: int) -> None:
        self._path = path
        self._crc32 = crc32

    @property
    def header(self) -> trainer_pb2.BatchHeader:
        """The batch's header; a file in records is read up to it only."""
        with self._open() as file:
            if not _is_stream(file):
                return self._old_message().header
            return self._start(self._messages(file)).header

    @property
    def trajectories(self) -> Iterator[trajectory_pb2.Trajectory]:
        return (m for m in self._contents() if isinstance(m, trajectory_pb2.Trajectory))

    @property
    def passes(self) -> Iterator[trainer_pb2.Pass]:
        return (m for m in self._contents() if isinstance(m, trainer_pb2.Pass))

    def _open(self) -> BinaryIO:
        try:
            return open_regular(self._path)
        except OSError as error:
            raise self._unread(error) from error

    def _contents(self) -> Iterator[Content]:
        with self._open() as file:
            if not _is_stream(file):
                batch = self._old_message()
                yield from batch.trajectories
                yield from batch.passes
                return
            messages = self._messages(file)
            self._start(messages)
            num_records = 1
            for message in messages:
                if isinstance(message, trainer_pb2.BatchFileEnd):
                    if message.num_records != num_records or next(messages, None) is not None:
                        raise self._damaged("it has other records than its end says")
                    return
                if not isinstance(message, Content):
                    raise self._damaged(f"a {message.DESCRIPTOR.name} is among its contents")
                num_records += 1
                yield message
            raise self._damaged("it ends before its last record")

    def _start(self, messages: Iterator[Message]) -> trainer_pb2.BatchFileStart:
        start = next(messages, None)
        if not isinstance(start, trainer_pb2.BatchFileStart):
            raise self._damaged("it does not begin with its header")
        return start

    def _messages(self, file: BinaryIO) -> Iterator[Message]:
        """Yields the messages of all records; checks the whole file's CRC-32 behind the last."""
        magic = self._read(file, len(MAGIC))
        if magic != MAGIC:
            if not _FORMAT.fullmatch(magic):
                raise self._damaged("its first line is no format")
            raise ProtocolError(unknown_fact(str(self._path), f"the format {magic!r}"))
        crc32 = zlib.crc32(magic)
        while head := self._read(file, HEAD.size):
            if len(head) < HEAD.size:
                raise self._damaged("it ends within a record")
            number, num_bytes, record_crc32 = HEAD.unpack(head)
            if num_bytes > MAX_RECORD_BYTES:
                raise self._damaged(f"a record claims {num_bytes} bytes")
            data = self._read(file, num_bytes)
            if len(data) < num_bytes:
                raise self._damaged("it ends within a record")
            if zlib.crc32(data) != record_crc32:
                raise self._damaged("the checksum of a record is wrong")
            crc32 = zlib.crc32(data, zlib.crc32(head, crc32))
            if number not in _KINDS:
                raise ProtocolError(unknown_fact(str(self._path), f"a record of kind {number}"))
            yield self._decoded(_KINDS[number], data)
        if crc32 != self._crc32:
            raise self._damaged("it is not the file that the journal names")

    def _read(self, file: BinaryIO, num_bytes: int) -> bytes:
        try:
            return file.read(num_bytes)
        except OSError as error:
            raise self._unread(error) from error

    def _decoded(self, kind: type[M], data: bytes) -> M:
        try:
            message = kind.FromString(data)
            check_bounds(message)
        except (DecodeError, ProtocolError) as error:
            raise self._damaged(str(error)) from error
        check_known(message, str(self._path))
        return message

    def _old_message(self) -> trainer_pb2.RecordedBatch:
        """Reads the file of an earlier release, which is one message."""
        try:
            data = read_regular(self._path)
        except OSError as error:
            raise self._unread(error) from error
        if zlib.crc32(data) != self._crc32:
            raise self._damaged("it is not the file that the journal names")
        return self._decoded(trainer_pb2.RecordedBatch, data)

    def _unread(self, error: OSError) -> ProtocolError:
        return ProtocolError(f"{self._path} cannot be read: {error.strerror}; {REMEDY}")

    def _damaged(self, cause: str) -> ProtocolError:
        return ProtocolError(f"{self._path} is damaged: {cause}; {REMEDY}")


def _is_stream(file: BinaryIO) -> bool:
    """Whether a file, at its beginning, is in records; leaves it there."""
    begin = file.read(len(NAME))
    file.seek(0, os.SEEK_SET)
    return begin == NAME
