"""Writes TensorBoard's event files; tensorboardX (2.6.5) would import torch into the controller.

A file is a sequence of records: length (uint64, little endian), masked CRC-32C of the length, data,
masked CRC-32C of the data. The data is a protobuf message Event of tensorboard/compat/proto.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.learner.controller.reporting.result_files import ResultFile, Tell

_VERSION = "brain.Event:2"
_CRC_POLYNOMIAL = 0x82F63B78
_CRC_MASK_DELTA = 0xA282EAD8
# Wire types of protobuf.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CRC_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC_TABLE = _crc_table()


class TensorBoardTracker:
    """Writes a file of records into a folder of event files; see `Tracker`."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        """Creates folder and file; `tell` gets warnings about a file that cannot be written."""
        # Without `parents`: a run folder that was removed must not be created again.
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
        now = time.time_ns()
        path = folder / f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        header = _record(_field(3, _BYTES, _VERSION.encode()))
        self._file = ResultFile(path, tell, header=header)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        summary = b"".join(
            _field(1, _BYTES, _field(1, _BYTES, name.encode()) + _field(2, _FIXED32, value))
            for name, value in values.items()
        )
        self._file.append(_record(_field(2, _VARINT, step) + _field(5, _BYTES, summary)))

    def samples(self, step: int, episodes: object, groups: object) -> None:
        """Leaves samples out: TensorBoard has no tables."""

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()


def _record(event: bytes) -> bytes:
    data = _field(1, _FIXED64, time.time()) + event
    length = struct.pack("<Q", len(data))
    return length + _masked(crc32c(length)) + data + _masked(crc32c(data))


def crc32c(data: bytes) -> int:
    """The CRC-32 with Castagnoli's polynomial (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> bytes:
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + _CRC_MASK_DELTA) & 0xFFFFFFFF)


def _field(number: int, wire_type: int, value: float | bytes) -> bytes:
    key = _varint(number << 3 | wire_type)
    if isinstance(value, bytes):
        return key + _varint(len(value)) + value
    if wire_type == _VARINT:
        return key + _varint(int(value))
    return key + struct.pack("<d" if wire_type == _FIXED64 else "<f", value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
