"""Requests of a process to Linux: to end with its parent, to reap orphans, to signal a child.

`python -m slipstream.core.machine.process PARENT PROGRAM ARGUMENTS...` replaces itself by PROGRAM,
which Linux kills when its parent, the process with id PARENT, ends. `below_this` returns the first
words of this command, with the calling process as PARENT.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process

# Enough for a run of hundreds of servers; programs can still loop over all file numbers.
MAX_OPEN_FILES = 65536
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# Variables that processes with environment code may see: no secrets.
_OPEN_VARIABLES = (
    *("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV"),
    # The address of the Hugging Face hub and its cache on this machine; HF_TOKEN stays behind.
    *("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    # Where this user's Docker answers, for environments that are containers.
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
    """Returns the first words of a command whose program is killed when this process ends.

    The caller appends the program and its arguments.
    """
    return [sys.executable, "-m", "slipstream.core.machine.process", str(os.getpid())]


def become_reaper() -> None:
    """Asks Linux to make this process, not init, the parent of orphans below it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_reaper() -> bool:
    """Whether this process has become a reaper."""
    found = ctypes.c_int()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def raise_open_files() -> None:
    """Raises this process's limit of open files to `MAX_OPEN_FILES`, or to the hard limit if lower.

    Child processes inherit the limit. Shells and Docker Engine 25 begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


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


def send_signal(process: Process, number: signal.Signals) -> None:
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
    kept = {name: variables[name] for name in _OPEN_VARIABLES if name in variables}
    return kept | {"PYTHONHASHSEED": "0"}


def flush_output() -> None:
    """Flushes stdout and stderr, and drops the output for which a full disk has no room.

    So a full disk changes neither a program's results nor its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The interpreter flushes again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        # The parent ended before this request, and its end comes only once.
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
