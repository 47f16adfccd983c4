"""What Redis counts beside the stream, and how lost data show in it.

Every entry is added in one transaction with `added`, and deleted in one with `removed`. So the
bytes in the stream are always those of the mark, plus `added`, less `removed`; and neither counter
ever falls. Whatever breaks that lost data: a flush, an eviction, an older file or replica.

Each sender counts what it added itself as well: an older file shows there, even when others have
added more since than was lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slipstream.protocol.errors import QueueError

# The values of the mark, of `added`, of `removed`, and of a sender's own `added`.
Counted: TypeAlias = Sequence[bytes | None]


def draw_mark(stream_bytes: int) -> str:
    """A new mark for a stream that holds `stream_bytes`, from which its counters begin."""
    return f"{secrets.token_hex(8)}-{stream_bytes}"


@dataclass(frozen=True)
class Counters:
    """Bytes that lay in the stream when the mark was drawn, were added and were removed since."""

    first_bytes: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0
    # Bytes that were added by the sender that reads the counters.
    own_bytes: int = 0

    @classmethod
    def of(cls, found: Counted) -> Counters:
        """The counters as Redis has them; QueueError when there is no mark, or no number."""
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
        """The larger of both, counter by counter: answers may overtake each other."""
        return Counters(
            self.first_bytes,
            max(self.added_bytes, other.added_bytes),
            max(self.removed_bytes, other.removed_bytes),
            max(self.own_bytes, other.own_bytes),
        )

    def loss_since(self, earlier: Counters) -> str:
        """What shows that data were lost since `earlier` was read; empty when nothing does."""
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
        """What shows that data were lost when the stream holds `stream_bytes`, as above."""
        if self.used_bytes != stream_bytes:
            return f"it counts {self.used_bytes} bytes that wait, and has {stream_bytes}"
        return ""


def loss_in(found: Counted, stream_bytes: int) -> str:
    """What shows that a stream of `stream_bytes` is not what its mark stands for; else empty."""
    try:
        return Counters.of(found).loss_against(stream_bytes)
    except QueueError as error:
        return str(error)


def _number(value: bytes | None) -> int:
    digits = value or b"0"
    if not digits.isdigit():
        raise QueueError(f"a counter holds {digits[:40]!r}, which is no number of bytes")
    return int(digits)
