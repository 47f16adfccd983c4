"""Checksums by which a file that only grows is recognised as far as it was read before."""

import zlib
from pathlib import Path

from slipstream.core.machine.files import open_regular

# The end of what was read, by which a start recognises a file of any length.
TAIL_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


def prefix_crc32(path: Path, num_bytes: int) -> int | None:
    """Returns the CRC-32 of the first bytes of a file, or None if it has fewer."""
    crc32 = 0
    with open_regular(path) as file:
        while num_bytes > 0:
            data = file.read(min(num_bytes, _BLOCK_BYTES))
            if not data:
                return None
            crc32 = zlib.crc32(data, crc32)
            num_bytes -= len(data)
    return crc32


def tail_crc32(path: Path, num_bytes: int) -> int | None:
    """Returns the CRC-32 of the last of the first `num_bytes` of a file, None if it has fewer."""
    begin = max(0, num_bytes - TAIL_BYTES)
    with open_regular(path) as file:
        file.seek(begin)
        tail = file.read(num_bytes - begin)
    is_whole = len(tail) == num_bytes - begin
    return zlib.crc32(tail) if is_whole else None
