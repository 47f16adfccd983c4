"""Runs one program inside a sandbox: `launcher.py PLAN PROGRAM ARGUMENTS...`, below a keeper.

PLAN is a JSON object with the fields of `Plan`. The launcher stays outside the sandbox, waits for
the program, and ends with the program's exit code or signal. If the program exceeds a limit of time
or of the folder, the launcher kills itself, and the keeper then kills the launcher's descendants.
"""

import errno
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from slipstream.core.machine.process import die_with_parent
from slipstream.environments.sandbox.plan import Limits, Plan
from slipstream.environments.sandbox.system_calls import (
    filtered,
    give_up_privileges,
)
from slipstream.environments.sandbox.thread_limit import (
    OWN_THREADS,
    become,
    counts_by_namespace,
    enter_namespace,
    fresh_account,
    give_folder,
    private_path,
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
_WAITING_SIGNALS = 1024
# Number of the program's account in its namespace, when bubblewrap is started by root.
_INNER_ACCOUNT = 1
# The process that bubblewrap tells.
_CHILD = re.compile(rb'"child-pid": (\d+)\D')


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
        # Signals that wait, of all processes of the user: no neighbour may find none left.
        resource.RLIMIT_SIGPENDING: _WAITING_SIGNALS,
    }
    for name, value in limits.items():
        # At the soft limit of processor time SIGXCPU shows the cause; the hard limit always kills.
        resource.setrlimit(name, (value, value + (name == resource.RLIMIT_CPU)))
    start = _in_sandlock if plan.backend == "sandlock" else _in_bubblewrap
    wait = start(plan, command)
    statuses = list[int]()
    waiting = threading.Thread(target=lambda: statuses.append(wait()), daemon=True)
    until_s = time.monotonic() + plan.limits.seconds
    waiting.start()
    waiting.join(CHECK_PERIOD_S)
    while waiting.is_alive():
        late = "seconds" if time.monotonic() > until_s else ""
        if limit := late or _exceeded(plan.folder, plan.limits):
            bound = getattr(plan.limits, limit)
            what = f"\nit went beyond {limit} = {bound} of the sandbox\n"
            os.write(plan.cause_fd, what.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        waiting.join(CHECK_PERIOD_S)
    status = statuses[0] if statuses else 125
    if status < 0:
        if status == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _in_sandlock(plan: Plan, command: Sequence[str]) -> Callable[[], int]:
    """Starts the program; returns a function that waits for its exit status, or -N for signal N."""
    import sandlock

    threads = plan.limits.threads + OWN_THREADS
    account = own_account(plan)
    if account:
        give_folder(plan.folder, account)
        become(account)
        # Linux forgets this when a process becomes another account.
        die_with_parent()
    elif os.geteuid() == 0 or not enter_namespace():
        # Only the keeper looks at threads.
        threads = 0
    give_up_privileges()
    cwd = plan.cwd or plan.folder
    box = sandlock.Sandbox(
        fs_readable=[*_readable(plan), *_DEVICES],
        fs_writable=[plan.folder, "/dev/null"],
        cwd=cwd,
        clean_env=True,
        env=dict(os.environ),
        max_memory=plan.limits.memory_bytes,
        max_processes=plan.limits.processes,
        max_open_files=plan.limits.open_files,
        no_coredump=True,
        net_allow=[f"tcp://127.0.0.1:{plan.port}"] if plan.port else [],
    )
    # The filter is not for the launcher: sandlock makes calls here that no program may make.
    process = box.popen(filtered(command, cwd, threads=threads, with_port=bool(plan.port)))

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
    account = fresh_account()
    threads = plan.limits.threads + OWN_THREADS
    if not (account or counts_by_namespace()):
        # Only the keeper looks at threads.
        threads = 0
    cwd = plan.cwd or plan.folder
    # In the namespace the account is the second of two.
    inner_account = _INNER_ACCOUNT if account else 0
    paths = _readable(plan)
    # bubblewrap would make these folders for our own account only.
    below = (*paths, *_DEVICES, plan.folder)
    parents = {str(parent) for path in below for parent in Path(path).parents} - {"/"}
    folders = [part for path in sorted(parents) for part in ("--perms", "0755", "--dir", path)]
    binds = [part for path in paths for part in ("--ro-bind", path, path)]
    devices = [part for path in (*_DEVICES, "/dev/null") for part in ("--dev-bind", path, path)]
    confined = [
        "--unshare-all",
        "--cap-drop",
        "ALL",
        "--die-with-parent",
        "--new-session",
        *folders,
        *binds,
        *devices,
        "--bind",
        plan.folder,
        plan.folder,
        "--remount-ro",
        "/",
    ]
    program = filtered(command, cwd, threads=threads, account=inner_account)

    def set_own_limits() -> None:
        """Sets limits of memory and open files, which bubblewrap does not set."""
        for name, bound in (
            (resource.RLIMIT_DATA, plan.limits.memory_bytes),
            (resource.RLIMIT_NOFILE, plan.limits.open_files),
        ):
            resource.setrlimit(name, (bound, bound))

    if account:
        give_folder(plan.folder, account)
        process = _with_account(account, confined, program, set_own_limits)
    else:
        process = subprocess.Popen(
            ["bwrap", "--unshare-user", "--disable-userns", *confined, "--", *program],
            preexec_fn=set_own_limits,
        )

    def wait() -> int:
        status = process.wait()
        number = status - _SIGNAL_STATUS
        return -number if 0 < number <= _LAST_SIGNAL else status

    return wait


def _with_account(
    account: int, confined: Sequence[str], program: Sequence[str], set_limits: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Starts bubblewrap as root, with `account` as the second account of its namespace."""
    facts_read, facts_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    process = subprocess.Popen(
        [
            "bwrap",
            "--unshare-user",
            "--info-fd",
            str(facts_write),
            "--userns-block-fd",
            str(mapped_read),
            *confined,
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--",
            *program,
        ],
        pass_fds=[facts_write, mapped_read],
        preexec_fn=set_limits,
    )
    os.close(facts_write)
    os.close(mapped_read)
    facts = b""
    while (child := _CHILD.search(facts)) is None and (part := os.read(facts_read, 1024)):
        facts += part
    # Without the child, bubblewrap has said why, and ends.
    if child is not None:
        for kind in ("uid", "gid"):
            accounts = f"0 0 1\n{_INNER_ACCOUNT} {account} 1\n"
            Path(f"/proc/{int(child[1])}/{kind}_map").write_text(accounts)
        os.write(mapped_write, b".")
    os.close(mapped_write)
    return process


def own_account(plan: Plan) -> int:
    """Returns the number of an account for a program in sandlock, or 0 if it must stay ours.

    Under Landlock no other account can read below a folder that only root can enter.
    """
    if not plan.may_change_account:
        return 0
    return 0 if private_path([*_readable(plan), os.path.dirname(plan.folder)]) else fresh_account()


def _readable(plan: Plan) -> list[str]:
    """Returns the paths that the program may read, besides its folder and the devices."""
    python_folders = (sys.prefix, sys.base_prefix)
    return [
        path for path in (*_SYSTEM_PATHS, *python_folders, *plan.readable) if os.path.exists(path)
    ]


def _exceeded(folder: str, limits: Limits) -> str:
    """Returns the name of the limit that files below `folder` exceed, or "" if they exceed none."""
    num_bytes = 0
    entries = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as inside:
                for entry in inside:
                    entries += 1
                    facts = entry.stat(follow_symlinks=False)
                    num_bytes += facts.st_blocks * 512
                    if stat.S_ISDIR(facts.st_mode):
                        folders.append(entry.path)
                    if num_bytes > limits.folder_bytes:
                        return "folder_bytes"
                    if entries > limits.folder_files:
                        return "folder_files"
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "folder_files"
            # Otherwise, the program has removed or renamed the folder meanwhile.
    return ""
