"""A process that starts programs in sandboxes by forks of itself.

To import what a keeper and a launcher need takes a hundred times as long as a fork.

    starter.py DESCRIPTOR

DESCRIPTOR is a socket. A message there has the descriptor of a file that describes a program, and
those of its pipes: stdin, stdout, stderr, and the one of its cause. The answer is 0 with a
descriptor of the program's keeper, or the number of the error why there is none. At its end the
keeper writes "ended STATUS", a wait status, to the last of the pipes. The starter ends when the
socket is closed, and Linux then tells the keepers to end.
"""

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from slipstream.core.machine.keeper import Bounds, Keeper
from slipstream.core.machine.process import die_with_parent
from slipstream.environments.sandbox.launcher import launch
from slipstream.environments.sandbox.plan import Plan

# Bytes of the launcher itself, which the keeper counts too.
_LAUNCHER_BYTES = 192 << 20
# Processes of launcher and bubblewrap, and their threads.
_OWN_PROCESSES = 4
_OWN_THREADS = 8
NUM_DESCRIPTORS = 5


def described(command: Sequence[str], plan: Plan, variables: Mapping[str, str]) -> int:
    """Returns a new descriptor of a file in memory that describes a program."""
    descriptor = os.memfd_create("start")
    os.write(descriptor, json.dumps([command, plan.text(), variables]).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def main(arguments: Sequence[str]) -> None:
    """Starts a program for each message, until the socket is closed."""
    # Launchers say why they lack it.
    with contextlib.suppress(ImportError, OSError):
        import sandlock  # noqa: F401
    gc.freeze()
    asks = socket.socket(fileno=int(arguments[0]))
    starter = os.getpid()
    while True:
        message, descriptors, *_ = socket.recv_fds(asks, 1, NUM_DESCRIPTORS)
        if not message:
            return
        try:
            if len(descriptors) < NUM_DESCRIPTORS:
                raise OSError(errno.EMFILE, "descriptors were lost")
            if (pid := os.fork()) == 0:
                asks.close()
                _keep(starter, *descriptors)
            keepers = [os.pidfd_open(pid)]
            error_number = 0
        except OSError as error:
            keepers = []
            error_number = error.errno or errno.EIO
        socket.send_fds(asks, [b"%d" % error_number], keepers)
        for descriptor in (*descriptors, *keepers):
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            # A keeper that has ended keeps its number until here.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(
    starter: int, plan_file: int, stdin: int, stdout: int, stderr: int, cause: int
) -> NoReturn:
    """Becomes the keeper of the program that the file `plan_file` describes."""
    # Keeper and launcher end too soon for a collection to be worth its time.
    gc.disable()
    try:
        os.setsid()
        die_with_parent(signal.SIGTERM)
        if os.getppid() != starter:
            os._exit(127)
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        with os.fdopen(plan_file, encoding="utf-8") as file:
            command, plan_text, variables = json.load(file)
        os.environ.clear()
        os.environ.update(variables)
        # Neither the launcher nor the program may tell that it has ended.
        os.set_inheritable(cause, False)
        plan = replace(Plan.of(plan_text), cause_fd=cause)
        os.chdir(plan.folder)
        keeper = Keeper(
            Bounds(
                memory_bytes=plan.limits.memory_bytes + _LAUNCHER_BYTES,
                memory_setting="memory_bytes",
                processes=plan.limits.processes + _OWN_PROCESSES,
                processes_setting="processes",
                threads=plan.limits.threads + _OWN_THREADS,
                threads_setting="threads",
            )
        )
        status = keeper.run(lambda: launch(plan, command))
        # No program is to blame for the end of the starter.
        if os.getppid() == starter:
            os.write(cause, f"{keeper.cause}\nended {status}".encode())
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(127)
