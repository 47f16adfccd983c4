"""Main memory: what a rollout server with all its processes uses, and what there is."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

# Looking through all processes of a machine takes too long for every heartbeat.
_LOOK_S = 5.0
# The limit of a container, as it sees it itself: cgroup v2, v1.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def available_bytes() -> int:
    """Memory of this machine, or of its container if that may use less."""
    found = [int(psutil.virtual_memory().total)]
    for path in _CONTAINER_LIMITS:
        # "max": it may use all.
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return min(found)


class ProcessMemory:
    """Resident bytes of this process and all below it; pages that several share count for each."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._looked_s = -_LOOK_S
        self._bytes = 0

    def resident_bytes(self) -> int:
        """As of the last look, at most 5 s ago."""
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            below = self._process.children(recursive=True)
            self._bytes = sum(_resident(process) for process in (self._process, *below))
        return self._bytes


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        # It ended since it was listed.
        return 0
