"""Processes that must not outlive the one that started them.

`python -m slipstream.protocol.process PROGRAM ARGUMENTS...` becomes PROGRAM, with that promise
made.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# What environment code may see of our environment: no secrets.
_OPEN_VARIABLES = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process `number` when the thread that started it ends.

    Elsewhere nothing happens.

    The promise survives `exec`, not `fork`. Start such a process from a thread that lives as long
    as its process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def become_reaper() -> None:
    """Asks Linux to give this process what loses its parent below it, in the place of init."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a process with environment code gets."""
    return {name: variables[name] for name in _OPEN_VARIABLES if name in variables}


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
