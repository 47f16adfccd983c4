"""The processes below one process on Linux: their list, their memory, and killing them.

The kernel may give the pid of an ended process to a new one at any moment. So a process is
identified by its pid and start time, and is signalled through a handle (pidfd) that is opened
before the start time is compared.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CHILDREN_LISTED = (_PROC / "thread-self" / "children").exists()


@dataclass(frozen=True)
class Descendant:
    """One process; `start` is its start time in the kernel's ticks."""

    pid: int
    start: int


def descendants(root: int) -> list[Descendant]:
    """Returns the processes below `root` at this moment, without zombies."""
    found: list[Descendant] = []
    open_pids, seen = [root], {root}
    children = _lister()
    while open_pids:
        for pid in children(open_pids.pop()):
            if pid in seen:
                continue
            seen.add(pid)
            open_pids.append(pid)
            start = _start_of(pid)
            if start is not None:
                found.append(Descendant(pid, start))
    return found


def kill_orphans(own: Collection[int]) -> bool:
    """Kills and reaps the orphans that this process adopted; returns whether there were any.

    Orphans are the children of this process that are not in `own` and belong to another session.
    """
    orphans = [pid for pid in _lister()(os.getpid()) if pid not in own and _has_left(pid)]
    for pid in orphans:
        # A child that has not been waited for keeps its pid.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def _has_left(pid: int) -> bool:
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def kill(process: Descendant) -> None:
    """Kills `process`, and no newer process with its pid; does nothing if `process` has ended."""
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
    """Returns a process's resident memory (RSS), or 0 if it has ended; shared pages count fully."""
    try:
        pages = (_PROC / str(process.pid) / "statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def shared_out_bytes(process: Descendant) -> int:
    """Returns a process's memory (PSS), in which a page shared by n processes counts one n-th.

    Returns the RSS if the PSS cannot be read, or 0 if the process has ended.
    """
    try:
        text = (_PROC / str(process.pid) / "smaps_rollup").read_text()
    except OSError:
        # The process is gone, or this user may not read its file.
        return resident_bytes(process)
    kib = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return int(kib[0]) << 10 if kib else 0


def kernel_oom_kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory since the system start.

    Returns 0 if the kernel does not report this number.
    """
    with contextlib.suppress(OSError):
        for line in (_PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _children(pid: int) -> list[int]:
    """Returns the children of all threads of `pid`, or [] for a process that has ended."""
    found: list[int] = []
    tasks = _PROC / str(pid) / "task"
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            # A thread may end while its process still runs.
            with contextlib.suppress(OSError):
                found += map(int, (tasks / task / "children").read_text().split())
    return found


def _lister() -> Callable[[int], list[int]]:
    """Returns a function that lists the children of a process by its pid, zombies included."""
    if _CHILDREN_LISTED:
        return _children
    # Without a list of children, the kernel must be asked about all processes.
    parents = _all_children()
    return lambda pid: parents.get(pid, [])


def _all_children() -> dict[int, list[int]]:
    """Returns the children of every process of the machine, by parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (_PROC / name / "stat").read_text().rpartition(")")[2].split()
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _start_of(pid: int) -> int | None:
    """Returns the start time of `pid`, or None if it has ended or is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name is in parentheses and may itself contain parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
