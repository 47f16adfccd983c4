"""A keeper: runs a program, and at the end kills every process that the program has started.

    python -m slipstream.core.machine.keeper [--cause-fd FD] [LIMITS] -- PROGRAM ARGUMENTS...

The keeper runs between its parent and PROGRAM. It is the reaper of all processes below PROGRAM, so
a process that leaves its session, or loses its parent, stays below the keeper.

The keeper waits for the end of PROGRAM, SIGTERM, the end of its parent, or an exceeded limit. After
the first of these it kills every process below it, and ends with PROGRAM's exit code or signal. If
a limit or the kernel's memory management ended PROGRAM, the keeper writes the cause to FD.
"""

import argparse
import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from slipstream.core.machine import process

# Seconds after SIGTERM in which PROGRAM may end before the keeper kills it.
GRACE_S = 2.0
# Seconds within which killed processes are gone, unless the kernel itself is stuck.
KILL_LIMIT_S = 10.0
# Seconds between two checks of the limits: a program fills memory within seconds.
CHECK_PERIOD_S = 0.2
# Seconds that the kernel may take to end a large process that it has chosen.
OOM_RECENT_S = 10.0
# Most ended processes that nobody waits for. Each keeps a number of the machine, which has 32,768
# of them where nobody has set more.
MOST_ZOMBIES = 256
# Score with which the kernel ends a process first when memory runs out.
EXPENDABLE = "1000"
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a program with its descendants, each of which 0 switches off.

    A `_setting` names its limit in the message about an excess.
    """

    memory_bytes: int = 0
    memory_setting: str = "the limit"
    processes: int = 0
    processes_setting: str = "the limit"
    threads: int = 0
    threads_setting: str = "the limit"


class Keeper:
    """Runs one program, and ends all processes below it."""

    def __init__(self, bounds: Bounds) -> None:
        """Limits the program with its descendants."""
        self._bounds = bounds
        self._parent = os.getppid()
        self._status: int | None = None
        self._oom_kills = process.kernel_oom_kills()
        self._oom_at_s = -OOM_RECENT_S
        # Why a limit or the kernel ended the program; "" if neither did.
        self.cause = ""

    def run(self, program: Callable[[], None]) -> int:
        """Runs a program, then kills all processes below the keeper; returns the wait status.

        `program` is called in a process of its own, which it replaces or ends. The status is
        SIGKILL's if that process had not ended. Blocks until these processes have ended, or have
        not reacted for `KILL_LIMIT_S` seconds.
        """
        if self.begin():
            try:
                program()
            finally:
                if sys.exc_info()[1] is not None:
                    traceback.print_exc()
                os._exit(127)
        return self.keep()

    def begin(self) -> bool:
        """Forks; returns True in the process that is to be the program, False in the keeper.

        The keeper calls `keep` next.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        process.become_reaper()
        process.die_with_parent(signal.SIGTERM)
        self._program = os.fork()
        if self._program:
            return False
        try:
            # A program that signals its own group does not reach the keeper.
            os.setsid()
            process.die_with_parent()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write(EXPENDABLE)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        except BaseException:  # noqa: BLE001 - the caller's code is for the program alone
            traceback.print_exc()
            os._exit(127)
        return True

    def keep(self) -> int:
        """Waits for the end of the program that has begun; see `run`."""
        told_to_end = False
        while self._status is None and not self.cause and not told_to_end:
            received = signal.sigtimedwait(_WATCHED, CHECK_PERIOD_S)
            kills = process.kernel_oom_kills()
            if kills != self._oom_kills:
                self._oom_kills, self._oom_at_s = kills, time.monotonic()
            self._reap()
            told_to_end = received is not None and received.si_signo == signal.SIGTERM
            if self._status is None:
                self.cause = self._exceeded(*process.descendants_and_zombies(os.getpid()))
        if told_to_end and os.getppid() == self._parent:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    # The program leads its group and is not reaped: the pid still belongs to it.
                    os.killpg(self._program, signal.SIGTERM)
            until_s = time.monotonic() + GRACE_S
            while self._status is None and (left_s := until_s - time.monotonic()) > 0:
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
                self._reap()
        was_killed = self._status == signal.SIGKILL
        if was_killed and time.monotonic() - self._oom_at_s < OOM_RECENT_S:
            self.cause = "out of memory: the kernel killed it"
        self._kill_all()
        return signal.SIGKILL if self._status is None else self._status

    def _exceeded(self, processes: Sequence[process.Descendant], num_zombies: int) -> str:
        """Returns the limit that `processes`, and ended ones beside them, exceed, or ""."""
        bounds = self._bounds
        limit = bounds.memory_bytes
        if bounds.processes and len(processes) > bounds.processes:
            rule = f"{bounds.processes_setting} = {bounds.processes}"
            return f"it had {len(processes)} processes, more than {rule}"
        if bounds.processes and num_zombies > MOST_ZOMBIES:
            return (
                f"it had {num_zombies} dead processes that none of its processes waits for, more "
                f"than {MOST_ZOMBIES}"
            )
        num_threads = sum(descendant.num_threads for descendant in processes)
        if bounds.threads and num_threads > bounds.threads:
            rule = f"{bounds.threads_setting} = {bounds.threads}"
            return f"it had {num_threads} threads, more than {rule}"
        # Pages that several processes share are counted for each of them first; the exact count
        # takes longer.
        if not limit or sum(map(process.resident_bytes, processes)) <= limit:
            return ""
        used_bytes = sum(map(process.shared_out_bytes, processes))
        if used_bytes <= limit:
            return ""
        return (
            f"out of memory: it took {used_bytes / (1 << 30):.2f} GiB, more than "
            f"{bounds.memory_setting} = {limit / (1 << 30):.2f}"
        )

    def _reap(self) -> bool:
        """Reaps the processes that have ended; returns whether any process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._program:
                self._status = status

    def _kill_all(self) -> None:
        killed: set[process.Descendant] = set()
        until_s = time.monotonic() + KILL_LIMIT_S
        while self._reap():
            survivors = process.descendants(os.getpid())
            new = set(survivors) - killed
            for survivor in survivors:
                process.kill(survivor)
            if new:
                # A killed process may have started others meanwhile: look again at once.
                killed |= new
                until_s = time.monotonic() + KILL_LIMIT_S
                continue
            if time.monotonic() > until_s:
                pids = ", ".join(str(survivor.pid) for survivor in survivors)
                print(f"slipstream: these processes do not end: {pids}", file=sys.stderr)
                return
            signal.sigtimedwait({signal.SIGCHLD}, CHECK_PERIOD_S)


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the program below a keeper, and exits with the program's code or signal."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.core.machine.keeper")
    parser.add_argument("--cause-fd", type=int, default=2, help="where to say why it was ended")
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--memory-setting", default="the limit")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--processes-setting", default="the limit")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--threads-setting", default="the limit")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.cause_fd > 2:
        os.set_inheritable(options.cause_fd, False)
    if sys.platform != "linux":
        os.execvp(options.command[0], options.command)
    command = options.command
    bounds = {limit.name: getattr(options, limit.name) for limit in fields(Bounds)}
    keeper = Keeper(Bounds(**bounds))

    def become() -> NoReturn:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"slipstream: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    status = keeper.run(become)
    if keeper.cause:
        os.write(options.cause_fd, f"{keeper.cause}\n".encode())
    if os.WIFSIGNALED(status):
        # The program has left its core file, if any; the keeper's core would be useless.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1:])
