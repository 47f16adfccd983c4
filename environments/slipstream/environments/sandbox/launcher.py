"""Runs one program inside a sandbox: `launcher.py PLAN PROGRAM ARGUMENTS...`, below a keeper.

PLAN is a JSON object with the fields of `Plan`. The launcher stays outside the sandbox, waits for
the program, and ends with the program's exit code or signal. If the program exceeds a limit of time
or of the folder, the launcher kills itself, and the keeper then kills the launcher's descendants.
"""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from slipstream.environments.sandbox.plan import Limits, Plan
from slipstream.environments.sandbox.system_calls import (
    filter_program,
    filtered,
    give_up_privileges,
)

# Seconds between two checks of the time and the folder.
CHECK_PERIOD_S = 0.2
# Paths of the system that programs read, if they are there.
_SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/nix/store",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/pki/ca-trust/extracted",
    "/etc/crypto-policies/back-ends",
)
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")
# Exit status, minus the signal, of a program that a signal ended, by bubblewrap and shells.
_SIGNAL_STATUS = 128
_LAST_SIGNAL = 64


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the program of a command line."""
    launch(Plan.of(arguments[0]), arguments[1:])


def launch(plan: Plan, command: Sequence[str]) -> NoReturn:
    """Runs a command in its sandbox, and ends with the program's exit code or signal.

    At an exceeded limit of time or of the folder it kills this launcher.
    """
    if plan.cause_fd > 2:
        os.set_inheritable(plan.cause_fd, False)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: plan.limits.file_bytes,
        resource.RLIMIT_CPU: plan.limits.processor_s,
    }
    for name, value in limits.items():
        # At the soft limit of processor time SIGXCPU shows the cause; the hard limit always kills.
        resource.setrlimit(name, (value, value + (name == resource.RLIMIT_CPU)))
    start = _in_sandlock if plan.backend == "sandlock" else _in_bubblewrap
    wait = start(plan, command)
    found = list[int]()
    waiting = threading.Thread(target=lambda: found.append(wait()), daemon=True)
    until_s = time.monotonic() + plan.limits.seconds
    waiting.start()
    waiting.join(CHECK_PERIOD_S)
    while waiting.is_alive():
        late = "seconds" if time.monotonic() > until_s else ""
        if limit := late or _exceeded(plan.folder, plan.limits):
            most = getattr(plan.limits, limit)
            what = f"\nit went beyond {limit} = {most} of the sandbox\n"
            os.write(plan.cause_fd, what.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        waiting.join(CHECK_PERIOD_S)
    status = found[0] if found else 125
    if status < 0:
        if status == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _in_sandlock(plan: Plan, command: Sequence[str]) -> Callable[[], int]:
    """Starts the program; returns a function that waits for its exit status, or -N for signal N."""
    import sandlock

    give_up_privileges()
    box = sandlock.Sandbox(
        fs_readable=[*_readable(plan), *_DEVICES],
        fs_writable=[plan.folder, "/dev/null"],
        cwd=plan.cwd or plan.folder,
        clean_env=True,
        env=dict(os.environ),
        max_memory=plan.limits.memory_bytes,
        max_processes=plan.limits.processes,
        max_open_files=plan.limits.open_files,
        no_coredump=True,
        net_allow=[f"tcp://127.0.0.1:{plan.port}"] if plan.port else [],
    )
    # The filter is not for the launcher: sandlock makes calls here that no program may make.
    process = box.popen(filtered(command, with_port=bool(plan.port)))

    def wait() -> int:
        result = process.wait()
        if result.reason is sandlock.ExitReason.SIGNALED:
            return -int(result.signal)
        if result.reason is sandlock.ExitReason.KILLED:
            # A program that asks for too much memory ends this way; sandlock gives no reason.
            return -signal.SIGKILL
        return int(result.exit_code) if result.error is None else 125

    return wait


def _in_bubblewrap(plan: Plan, command: Sequence[str]) -> Callable[[], int]:
    """Starts the program; returns a function that waits for its exit status, or -N for signal N."""
    read_end, write_end = os.pipe()
    os.write(write_end, filter_program())
    os.close(write_end)
    binds = [part for path in _readable(plan) for part in ("--ro-bind", path, path)]
    devices = [part for path in (*_DEVICES, "/dev/null") for part in ("--dev-bind", path, path)]

    def set_own_limits() -> None:
        """Sets limits of memory and open files, which bubblewrap does not set."""
        for name, most in (
            (resource.RLIMIT_DATA, plan.limits.memory_bytes),
            (resource.RLIMIT_NOFILE, plan.limits.open_files),
        ):
            resource.setrlimit(name, (most, most))

    process = subprocess.Popen(
        [
            "bwrap",
            "--unshare-user",
            "--unshare-all",
            "--disable-userns",
            "--cap-drop",
            "ALL",
            "--die-with-parent",
            "--new-session",
            "--seccomp",
            str(read_end),
            *binds,
            *devices,
            "--bind",
            plan.folder,
            plan.folder,
            "--remount-ro",
            "/",
            "--chdir",
            plan.cwd or plan.folder,
            "--",
            *command,
        ],
        pass_fds=[read_end],
        preexec_fn=set_own_limits,
    )
    os.close(read_end)

    def wait() -> int:
        status = process.wait()
        number = status - _SIGNAL_STATUS
        return -number if 0 < number <= _LAST_SIGNAL else status

    return wait


def _readable(plan: Plan) -> list[str]:
    """Returns the paths that the program may read, besides its folder and the devices."""
    own = (sys.prefix, sys.base_prefix)
    return [path for path in (*_SYSTEM_PATHS, *own, *plan.readable) if os.path.exists(path)]


def _exceeded(folder: str, limits: Limits) -> str:
    """Returns the name of the limit that files below `folder` exceed, or "" if they exceed none."""
    taken = 0
    entries = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as inside:
                for entry in inside:
                    entries += 1
                    facts = entry.stat(follow_symlinks=False)
                    taken += facts.st_blocks * 512
                    if stat.S_ISDIR(facts.st_mode):
                        folders.append(entry.path)
                    if taken > limits.folder_bytes:
                        return "folder_bytes"
                    if entries > limits.folder_files:
                        return "folder_files"
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "folder_files"
            # Otherwise, the program has removed or renamed the folder meanwhile.
    return ""
