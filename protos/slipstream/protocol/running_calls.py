"""The record of a worker's current calls, in a file in memory that outlives the worker.

A worker writes the record whenever a call begins or ends. The rollout server, which created the
file, reads it after the worker was lost, to learn which calls the worker was answering.
"""

import json
import os
from dataclasses import dataclass
from typing import Self

# Room for several thousand calls.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class RunningCalls:
    """The keys of the episodes with a call in progress, and of the episode whose code runs."""

    running: tuple[str, ...] = ()
    # Key of the episode whose code runs, set a moment after `running`; "" if none or not yet known.
    current: str = ""
    # File, line and function of `current`.
    place: str = ""

    def write(self, descriptor: int) -> None:
        """Replaces the record in the file `descriptor`, in one write."""
        text = json.dumps([self.running, self.current, self.place])
        os.pwrite(descriptor, f"{text}\n".encode(), 0)

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Returns the record in the file `descriptor`.

        The result is empty before the first write, and if the file has other contents: code of the
        environment can write to the file too.
        """
        line = os.pread(descriptor, _MAX_BYTES, 0).partition(b"\n")[0]
        try:
            running, current, place = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return cls()
        if not isinstance(running, list):
            return cls()
        if not all(isinstance(value, str) for value in (*running, current, place)):
            return cls()
        return cls(tuple(running), current, place)
