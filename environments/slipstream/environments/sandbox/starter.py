"""A process that starts programs in sandboxes by forks of itself.

To import what a keeper and a launcher need takes a hundred times as long as a fork.

    starter.py DESCRIPTOR

DESCRIPTOR is a socket. A message there has the descriptors `Start` and of the pipes of a program:
stdin, stdout, stderr, and the one of its cause. The answer is a descriptor of the program's keeper.
At its end the keeper writes "ended STATUS", a wait status, to the last of the pipes. The starter
ends when the socket is closed, and Linux then tells the keepers to end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from slipstream.core.machine.keeper import Keeper, ProgramLimits
from slipstream.environments.sandbox.launcher import launch
from slipstream.environments.sandbox.plan import Plan

# Bytes of the launcher itself, which the keeper counts too.
_LAUNCHER_BYTES = 192 << 20
# Processes of launcher and bubblewrap.
_OWN_PROCESSES = 4
NUM_DESCRIPTORS = 5


@dataclass(frozen=True)
class Start:
    """A program to be started: its command, plan and environment variables."""

    command: Sequence[str]
    plan: str
    variables: Mapping[str, str]

    def descriptor(self) -> int:
        """Returns a new descriptor of a file in memory with this as JSON."""
        descriptor = os.memfd_create("start")
        os.write(descriptor, json.dumps(asdict(self)).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor


def main(arguments: Sequence[str]) -> None:
    """Starts a program for each message, until the socket is closed."""
    if importlib.util.find_spec("sandlock") is not None:
        import sandlock  # noqa: F401 - for the launchers
    gc.freeze()
    asks = socket.socket(fileno=int(arguments[0]))
    while True:
        _, descriptors, *_ = socket.recv_fds(asks, 1, NUM_DESCRIPTORS)
        if not descriptors:
            return
        if (pid := os.fork()) == 0:
            asks.close()
            _keep(*descriptors)
        for each in descriptors:
            os.close(each)
        socket.send_fds(asks, [b"."], [keeper := os.pidfd_open(pid)])
        os.close(keeper)
        with contextlib.suppress(ChildProcessError):
            # A keeper that has ended keeps its number until here.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(asked: int, stdin: int, stdout: int, stderr: int, cause: int) -> NoReturn:
    """Becomes the keeper of the program that the file `asked` describes."""
    try:
        os.setsid()
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        with os.fdopen(asked, encoding="utf-8") as file:
            start = Start(**json.load(file))
        os.environ.clear()
        os.environ.update(start.variables)
        # Neither the launcher nor the program may tell that it has ended.
        os.set_inheritable(cause, False)
        plan = replace(Plan.of(start.plan), cause_fd=cause)
        os.chdir(plan.folder)
        limits = ProgramLimits(
            plan.limits.memory_bytes + _LAUNCHER_BYTES,
            "memory_bytes",
            plan.limits.processes + _OWN_PROCESSES,
            "processes",
        )
        keeper = Keeper(limits)
        status = keeper.run(lambda: launch(plan, start.command))
        os.write(cause, f"{keeper.cause}\nended {status}".encode())
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
