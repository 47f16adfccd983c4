"""Prepares a program so that the kernel bounds the threads of all its processes together.

The kernel's limit (RLIMIT_NPROC) counts the threads of one user in one user namespace, and never
holds for root. So a launcher gives a program a namespace of its own, or root gives it an account
that nobody else has. The program itself sets the limit, and cannot raise it again.
"""

import ctypes
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from slipstream.core.machine.files import sandbox_accounts

# Threads of launcher and bubblewrap that the kernel counts with those of the program.
OWN_THREADS = 2
# Linux that counts by namespaces.
_COUNTS_BY_NAMESPACE = (5, 14)
_CLONE_NEWUSER = 0x10000000


def counts_by_namespace() -> bool:
    """Whether this kernel counts the threads of a user in each user namespace by themselves."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if version is None:
        return False
    return (int(version[1]), int(version[2])) >= _COUNTS_BY_NAMESPACE


def gives_accounts() -> bool:
    """Whether this process, as root, gives programs accounts of their own."""
    return bool(sandbox_accounts())


def fresh_account() -> int:
    """Returns the number of an account that, by chance, no other process has.

    It is 0 if this process is not root, or has no accounts to give away.
    """
    accounts = sandbox_accounts()
    return secrets.choice(accounts) if accounts else 0


def give_folder(folder: str, account: int) -> None:
    """Gives `folder`, with all that is in it, to `account`; needs to be root."""
    os.chown(folder, account, account)
    for path, folders, files in os.walk(folder):
        for name in folders + files:
            inside = os.path.join(path, name)
            os.chown(inside, account, account, follow_symlinks=False)


def become(account: int) -> None:
    """Makes this process one of `account`; needs to be root, and cannot be undone."""
    os.setgroups([])
    os.setresgid(account, account, account)
    os.setresuid(account, account, account)


def private_path(paths: Iterable[str], *, with_parents: bool = True) -> str:
    """Returns the first of `paths` that not every account can read, or "".

    If `with_parents`, the folders above it count too. A path that is not there is not private.
    """
    for name in paths:
        path = Path(name).resolve()
        if not path.exists():
            continue
        mode = path.stat().st_mode
        if not mode & stat.S_IROTH:
            return name
        if path.is_dir() and not mode & stat.S_IXOTH:
            return name
        parents = path.parents if with_parents else ()
        for folder in parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return name
    return ""


def enter_namespace() -> bool:
    """Puts this process, which has one thread, into a user namespace of its own, as the same user.

    Returns False, and does nothing, if the machine does not allow it.
    """
    # Some machines let a process in, and then refuse it its user: a child tries it first.
    child = os.fork()
    if child == 0:
        try:
            _enter_namespace()
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return False
    _enter_namespace()
    return True


def _enter_namespace() -> None:
    user = os.geteuid()
    group = os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
