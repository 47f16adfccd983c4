"""Reads lines and JSON of a run's folder, which may be a stranger's: each line is bounded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import BinaryIO

from pydantic import JsonValue

LINE_BYTES = 16 << 20


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
