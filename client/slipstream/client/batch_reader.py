"""Reads batch files for checks of a run; shares no code with the controller that wrote them.

A file is a line with its format, then records. Each record is a byte with the kind of its message,
four bytes with the length, four with the message's CRC-32, little endian, and the message: the
header, trajectories or passes, and an end that counts the records. Files of older releases are one
`RecordedBatch`.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from google.protobuf.message import DecodeError
from slipstream.core.machine.files import open_regular
from slipstream.v1 import trainer_pb2, trajectory_pb2

Content: TypeAlias = trainer_pb2.BatchHeader | trajectory_pb2.Trajectory | trainer_pb2.Pass

# Most bytes of a record, which a stranger may have written, and of a file that is one message.
MOST_RECORD_BYTES = 64 << 20
MOST_MESSAGE_BYTES = (2 << 30) - 1
_FIRST_LINE = b"slipstream batch 2\n"
_START = 1
_END = 4
_MESSAGES: dict[int, Any] = {
    _START: trainer_pb2.BatchFileStart,
    2: trajectory_pb2.Trajectory,
    3: trainer_pb2.Pass,
    _END: trainer_pb2.BatchFileEnd,
}


def read_contents(path: Path, crc32: int) -> Iterator[Content]:
    """Yields the header of a batch, then its trajectories or passes, one in memory at a time.

    Raises OSError if the file cannot be read, and ValueError with the cause if it is damaged or
    has another CRC-32. What was yielded counts only when the iterator has ended.
    """
    with open_regular(path) as file:
        first_line = file.readline(len(_FIRST_LINE))
        if first_line != _FIRST_LINE:
            file.seek(0)
            yield from _one_message(file, crc32)
            return
        file_crc32 = zlib.crc32(first_line)
        kinds: list[int] = []
        while head := file.read(9):
            num_bytes = int.from_bytes(head[1:5], "little")
            if len(head) < 9 or num_bytes > MOST_RECORD_BYTES:
                raise ValueError(f"the head of record {len(kinds) + 1} is wrong")
            data = file.read(num_bytes)
            if zlib.crc32(data) != int.from_bytes(head[5:], "little"):
                raise ValueError(f"the checksum of record {len(kinds) + 1} is wrong")
            file_crc32 = zlib.crc32(head + data, file_crc32)
            kinds.append(head[0])
            if (len(kinds) == 1) != (head[0] == _START) or _END in kinds[:-1]:
                raise ValueError(f"record {len(kinds)} is not in its place")
            message = _decoded(head[0], data)
            if head[0] == _END:
                if message.num_records != len(kinds) - 1:
                    raise ValueError(f"its end counts {message.num_records} records")
            else:
                yield message.header if head[0] == _START else message
    if _END not in kinds:
        raise ValueError("its end is missing")
    if file_crc32 != crc32:
        raise ValueError("by its checksum")


def _decoded(kind: int, data: bytes) -> Any:  # noqa: ANN401 - one of the messages
    if kind not in _MESSAGES:
        raise ValueError(f"a record has the unknown kind {kind}")
    try:
        return _MESSAGES[kind].FromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def _one_message(file: BinaryIO, crc32: int) -> Iterator[Content]:
    data = file.read(MOST_MESSAGE_BYTES + 1)
    if zlib.crc32(data) != crc32 or len(data) > MOST_MESSAGE_BYTES:
        raise ValueError("by its checksum")
    try:
        batch = trainer_pb2.RecordedBatch.FromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    yield batch.header
    yield from batch.trajectories
    yield from batch.passes
