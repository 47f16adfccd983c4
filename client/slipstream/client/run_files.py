"""Reads the files of a run's folder, which may be a stranger's: each line and file is bounded.

Only regular files are opened, without waiting: a pipe or a device is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import JsonValue
from slipstream.core.regular_files import open_regular

LINE_BYTES = 16 << 20


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Returns the bytes of a regular file; raises OSError if it has more than `most_bytes`."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"{path} has more than {most_bytes} bytes")
    return data


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file with their newlines; of a line beyond `LINE_BYTES` its parts."""
    while line := file.readline(LINE_BYTES):
        yield line


def parsed(data: bytes) -> JsonValue:
    """Returns the parsed JSON, or None if it is invalid; NaN and infinities become None."""
    try:
        found: JsonValue = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return found


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
