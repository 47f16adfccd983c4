"""What a worker does at this moment, in memory that outlives it.

A worker writes the record whenever a call begins or ends. The rollout server, which made the
memory, reads it when the worker was lost: the calls in it were being answered.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

# Room for several thousand calls.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class CallRecord:
    """Episodes by key: those whose call is being answered, and the one whose code runs."""

    running: tuple[str, ...] = ()
    # Known a moment later than `running`; empty: none, or not known yet.
    current: str = ""
    # File, line and function of `current`.
    place: str = ""

    def write(self, descriptor: int) -> None:
        """Replaces the record in one write."""
        text = json.dumps([self.running, self.current, self.place])
        os.pwrite(descriptor, f"{text}\n".encode(), 0)

    @classmethod
    def read(cls, descriptor: int) -> CallRecord:
        """The record; an empty one before the first write.

        Code of the environment could write there, too: what is no record says nothing either.
        """
        line = os.pread(descriptor, _MAX_BYTES, 0).partition(b"\n")[0]
        try:
            running, current, place = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return cls()
        if not isinstance(running, list) or not _are_texts(*running, current, place):
            return cls()
        return cls(tuple(running), current, place)


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)
