"""The processes below one process, as Linux lists them: which there are, what they use, their end.

A pid alone may be given to another process at any moment. So a process is known by its pid and the
moment of its start, and is signalled through a handle that was opened before both were compared.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CHILDREN_LISTED = (_PROC / "thread-self" / "children").exists()


@dataclass(frozen=True)
class Descendant:
    """One process: `start` is when it began, in the kernel's ticks."""

    pid: int
    start: int


def descendants(root: int) -> list[Descendant]:
    """The processes below `root` at this moment, without those that are only to be reaped."""
    found: list[Descendant] = []
    open_pids, seen = [root], {root}
    # Only a kernel without these lists must be asked about all of its processes.
    parents = {} if _CHILDREN_LISTED else _all_children()
    while open_pids:
        parent = open_pids.pop()
        for pid in _children(parent) if _CHILDREN_LISTED else parents.get(parent, []):
            if pid in seen:
                continue
            seen.add(pid)
            open_pids.append(pid)
            start = _start_of(pid)
            if start is not None:
                found.append(Descendant(pid, start))
    return found


def kill(process: Descendant) -> None:
    """Kills exactly this process; nothing happens when it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if _start_of(process.pid) == process.start:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def resident_bytes(process: Descendant) -> int:
    """Memory of a process; pages that it shares with others count whole."""
    try:
        pages = (_PROC / str(process.pid) / "statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def shared_out_bytes(process: Descendant) -> int:
    """Memory of a process; of pages that n processes share it has one n-th."""
    try:
        text = (_PROC / str(process.pid) / "smaps_rollup").read_text()
    except OSError:
        # It is gone, or may not be looked at.
        return resident_bytes(process)
    kib = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return int(kib[0]) << 10 if kib else 0


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since the machine started."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _children(pid: int) -> list[int]:
    """The children of all threads of `pid`; a process that is gone has none."""
    found: list[int] = []
    tasks = _PROC / str(pid) / "task"
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            # A thread may end while its process goes on.
            with contextlib.suppress(OSError):
                found += map(int, (tasks / task / "children").read_text().split())
    return found


def _all_children() -> dict[int, list[int]]:
    """The children of every process of the machine, by parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (_PROC / name / "stat").read_text().rpartition(")")[2].split()
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _start_of(pid: int) -> int | None:
    """When `pid` began; None when it is gone or waits to be reaped."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may hold any.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
