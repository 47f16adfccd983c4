"""Counters in Redis beside the stream, which reveal lost data.

Every entry is added in one transaction with `added`, and deleted in one transaction with `removed`.
So the bytes in the stream always equal the bytes in the mark, plus `added`, less `removed`, and
neither counter ever falls. Otherwise data were lost: by a flush, an eviction, an older file or
replica.

Each sender also counts the bytes that it added itself. An older file shows there even when other
senders have added more since than was lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slipstream.core.errors import QueueError

# The values of the mark, of `added`, of `removed`, and of a sender's own `added`.
Counted: TypeAlias = Sequence[bytes | None]


def draw_mark(stream_bytes: int) -> str:
    """Returns a new mark for a stream that holds `stream_bytes` when its counters begin."""
    return f"{secrets.token_hex(8)}-{stream_bytes}"


@dataclass(frozen=True)
class Counters:
    """Bytes in the stream when the mark was drawn, and bytes added and removed since."""

    first_bytes: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0
    # Bytes that were added by the sender that reads the counters.
    own_bytes: int = 0

    @classmethod
    def of(cls, found: Counted) -> Counters:
        """Returns the counters from Redis's values.

        Raises QueueError without a mark or a number.
        """
        mark, added, removed, *own = found
        if mark is None:
            raise QueueError("it came back empty; was it restarted without its append-only file?")
        _, _, first = mark.partition(b"-")
        return cls(_number(first), _number(added), _number(removed), *map(_number, own))

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries of the stream."""
        return self.first_bytes + self.added_bytes - self.removed_bytes

    def newest(self, other: Counters) -> Counters:
        """Returns the larger value of each counter, because answers may overtake each other."""
        return Counters(
            self.first_bytes,
            max(self.added_bytes, other.added_bytes),
            max(self.removed_bytes, other.removed_bytes),
            max(self.own_bytes, other.own_bytes),
        )

    def loss_since(self, earlier: Counters) -> str:
        """Returns the sign that data were lost since `earlier` was read, or "" without a loss."""
        if self.used_bytes < 0:
            return f"it counts {self.used_bytes} bytes that wait"
        for name, before, now in (
            ("added", earlier.added_bytes, self.added_bytes),
            ("removed", earlier.removed_bytes, self.removed_bytes),
            ("added by this server", earlier.own_bytes, self.own_bytes),
        ):
            if now < before:
                return f"it counts {now} bytes {name}, and counted {before} before"
        return ""

    def loss_against(self, stream_bytes: int) -> str:
        """Returns the sign that data were lost if the stream holds `stream_bytes`, else ""."""
        if self.used_bytes != stream_bytes:
            return f"it counts {self.used_bytes} bytes that wait, and has {stream_bytes}"
        return ""


def loss_in(found: Counted, stream_bytes: int) -> str:
    """Returns the sign that a stream of `stream_bytes` does not fit its mark, else ""."""
    try:
        return Counters.of(found).loss_against(stream_bytes)
    except QueueError as error:
        return str(error)


def _number(value: bytes | None) -> int:
    digits = value or b"0"
    if not digits.isdigit():
        raise QueueError(f"a counter holds {digits[:40]!r}, which is no number of bytes")
    return int(digits)
