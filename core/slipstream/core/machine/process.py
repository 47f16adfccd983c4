"""Requests of a process to Linux, and the processes below it: their list, memory and end.

`python -m slipstream.core.machine.process PARENT PROGRAM ARGUMENTS...` replaces itself by PROGRAM,
which Linux kills when its parent, the process with id PARENT, ends. `below_this` returns the first
words of this command, with the calling process as PARENT.

The kernel may give the pid of an ended process to a new one at any moment. So a process is
identified by its pid and start time, and is signalled through a handle (pidfd) that is opened
before the start time is compared.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from asyncio.subprocess import Process


_PROC = Path("/proc")
_CHILDREN_LISTED = (_PROC / "thread-self" / "children").exists()


@dataclass(frozen=True)
class Descendant:
    """One process; `start` is its start time in the kernel's ticks."""

    pid: int
    start: int
    # When it was seen.
    num_threads: int = field(default=1, compare=False)


def descendants(root: int) -> list[Descendant]:
    """Returns the processes below `root` at this moment, without zombies."""
    return descendants_and_zombies(root)[0]


def descendants_and_zombies(root: int) -> tuple[list[Descendant], int]:
    """Returns the processes below `root`, and how many others ended and keep their numbers."""
    processes: list[Descendant] = []
    num_zombies = 0
    open_pids = [root]
    seen = {root}
    children = _lister()
    while open_pids:
        for pid in children(open_pids.pop()):
            if pid in seen:
                continue
            seen.add(pid)
            open_pids.append(pid)
            process = _seen(pid)
            if process is not None:
                processes.append(process)
            else:
                num_zombies += 1
    return processes, num_zombies


def kill_orphans(own_pids: Collection[int]) -> bool:
    """Kills and reaps the orphans that this process adopted; returns whether there were any.

    Orphans are children of this process that are not in `own_pids` and belong to another session.
    """
    were_killed = False
    for pid in _lister()(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            if pid not in own_pids and os.getsid(pid) != os.getsid(0):
                # A child that has not been waited for keeps its pid.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
                were_killed = True
    return were_killed


def kill(process: Descendant) -> None:
    """Kills `process`, and no newer process with its pid; does nothing if `process` has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if _seen(process.pid) == process:
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
    """Returns a process's memory (PSS), where shared pages count in part; RSS if unreadable."""
    try:
        text = (_PROC / str(process.pid) / "smaps_rollup").read_text()
    except OSError:
        # The process is gone, or this user may not read its file.
        return resident_bytes(process)
    kib = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return int(kib[0]) << 10 if kib else 0


def kernel_oom_kills() -> int:
    """Returns how many processes the kernel killed for lack of memory; 0 if it does not say."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _lister() -> Callable[[int], list[int]]:
    """Returns a function that lists the children of a pid, zombies included, [] after its end."""

    def children(pid: int) -> list[int]:
        pids: list[int] = []
        tasks = _PROC / str(pid) / "task"
        with contextlib.suppress(OSError):
            for task in os.listdir(tasks):
                # A thread may end while its process still runs.
                with contextlib.suppress(OSError):
                    pids += map(int, (tasks / task / "children").read_text().split())
        return pids

    if _CHILDREN_LISTED:
        return children
    # Without a list of children, the kernel must be asked about all processes.
    parents: dict[int, list[int]] = {}
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (_PROC / name / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(name))
    return lambda pid: parents.get(pid, [])


def _seen(pid: int) -> Descendant | None:
    """Returns the process `pid`, or None if it has ended or is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name is in parentheses and may itself contain parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Descendant(pid, start=int(fields[19]), num_threads=int(fields[17]))


# Enough for a run of hundreds of servers; programs can still loop over all file numbers.
MAX_OPEN_FILES = 65536
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
# Variables that processes with environment code may see: no secrets.
_OPEN_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    # The address of the Hugging Face hub and its cache on this machine; HF_TOKEN stays behind.
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    # The place where this user's Docker answers, for environments that are containers.
    "DOCKER_HOST",
)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process signal `number` when the thread that started it ends.

    On other systems the function does nothing. The request survives `exec`, but not `fork`. A
    parent must start such a process from a thread that lives as long as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def below_this() -> list[str]:
    """Returns words before a program and its arguments, which is killed when this one ends."""
    return [sys.executable, "-m", "slipstream.core.machine.process", str(os.getpid())]


def become_reaper() -> None:
    """Asks Linux to make this process, not init, the parent of orphans below it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_reaper() -> bool:
    """Whether this process has become a reaper."""
    is_set = ctypes.c_int()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_set), 0, 0, 0)
    return bool(is_set.value)


def raise_open_files() -> None:
    """Raises this process's limit of open files to `MAX_OPEN_FILES`, or to the hard limit if lower.

    Child processes inherit the limit. Shells and Docker Engine 25 begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


def most_connections(most: int = MAX_OPEN_FILES) -> int:
    """Returns `most`, or half of what this process may open if less: files need descriptors too.

    Strangers may fill a server's connections, which must not keep it from writing its files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 2)


@contextmanager
def without_collections() -> Iterator[None]:
    """Turns the garbage collector off within the block, for imports of vLLM or Megatron.

    These imports make millions of objects that stay, and scanning them would take a tenth of the
    import time. At the end of the block, all existing objects are exempt from later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def send_signal(process: "Process", number: signal.Signals) -> None:
    """Sends a signal to a child of the event loop, unless it has ended.

    The method of the same name also asks for the exit code, which the loop that waits then loses.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def open_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a process with an environment's code may see, without secrets.

    The result also fixes PYTHONHASHSEED, so that all processes iterate over sets of strings in the
    same order. A task number then means the same task in each process.
    """
    passed = {name: variables[name] for name in _OPEN_VARIABLES if name in variables}
    return passed | {"PYTHONHASHSEED": "0"}


def leave(code: int) -> NoReturn:
    """Ends this process with `code` after the atexit functions, without finalising its modules.

    Native threads that still run while Python finalises may abort the process after all its work,
    as those of torch's process groups do. Finalising also takes seconds, in which vLLM's client
    logs errors.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A full disk changes neither results nor the exit code.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        # The parent ended before this request, and its end comes only once.
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
