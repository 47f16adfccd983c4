"""The system calls that a sandboxed program may not make, as a seccomp filter of Linux.

Landlock, and so sandlock, still lets a program of the same user
- change the mode, owner and times of files that it can only read;
- read extended attributes of files, and watch names, in folders that it cannot read;
- block whoever opens a file;
- change the limits of processes outside the sandbox;
- fill memory that belongs to no process;
- use kernel interfaces that affect the whole machine.
The filter refuses all of these, under bubblewrap too.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

# Calls that do nothing and report success: programs that copy files expect that they work.
_PRETENDED = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
_REFUSED = (
    *("memfd_create", "memfd_secret", "mq_open"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open"),
    *("userfaultfd", "add_key", "request_key", "keyctl", "syslog", "setpriority", "ioprio_set"),
    *("inotify_init", "inotify_init1", "inotify_add_watch", "fanotify_init", "fanotify_mark"),
    # A named pipe blocks every process that opens it, as a device may.
    *("mknod", "mknodat", "file_setattr"),
)
# Extended attributes: these calls fail as on a file system without any.
_OF_MARKS = (
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
    *("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"),
    *("setxattrat", "getxattrat", "listxattrat", "removexattrat"),
)
# Calls whose first argument is a process, which must be 0: the caller.
_OF_ITSELF = (
    *("prlimit64", "sched_setaffinity", "sched_setattr"),
    *("sched_setparam", "sched_setscheduler"),
)
# Commands of fcntl that block or watch other processes: F_SETLEASE and F_NOTIFY.
_FCNTL_REFUSED = (1024, 1026)
# A socket is one of AF_UNIX, AF_INET and AF_INET6: sandlock judges these.
_SOCKET_FAMILIES = (1, 2, 10)

# Numbers of newer calls are the same everywhere.
_COMMON = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
_COMMON |= {"memfd_secret": 447, "fchmodat2": 452, "setxattrat": 463, "getxattrat": 464}
_COMMON |= {"listxattrat": 465, "removexattrat": 466, "file_setattr": 469}
_X86_64 = {"socket": 41, "fcntl": 72, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93}
_X86_64 |= {"lchown": 94, "syslog": 103, "utime": 132, "mknod": 133, "setpriority": 141}
_X86_64 |= {"sched_setparam": 142, "sched_setscheduler": 144, "setxattr": 188, "lsetxattr": 189}
_X86_64 |= {"fsetxattr": 190, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193}
_X86_64 |= {"listxattr": 194, "llistxattr": 195, "flistxattr": 196}
_X86_64 |= {"removexattr": 197, "lremovexattr": 198, "fremovexattr": 199}
_X86_64 |= {"sched_setaffinity": 203, "utimes": 235, "mq_open": 240, "add_key": 248}
_X86_64 |= {"request_key": 249, "keyctl": 250, "ioprio_set": 251}
_X86_64 |= {"inotify_init": 253, "inotify_add_watch": 254, "mknodat": 259, "fchownat": 260}
_X86_64 |= {"futimesat": 261, "fchmodat": 268, "utimensat": 280, "inotify_init1": 294}
_X86_64 |= {"perf_event_open": 298, "fanotify_init": 300, "fanotify_mark": 301}
_X86_64 |= {"prlimit64": 302, "sched_setattr": 314, "memfd_create": 319, "bpf": 321}
_X86_64 |= {"userfaultfd": 323}
_AARCH64 = {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "getxattr": 8, "lgetxattr": 9}
_AARCH64 |= {"fgetxattr": 10, "listxattr": 11, "llistxattr": 12, "flistxattr": 13}
_AARCH64 |= {"removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "fcntl": 25}
_AARCH64 |= {"inotify_init1": 26, "inotify_add_watch": 27, "ioprio_set": 30, "mknodat": 33}
_AARCH64 |= {"fchmod": 52, "fchmodat": 53, "fchownat": 54}
_AARCH64 |= {"fchown": 55, "utimensat": 88, "syslog": 116, "sched_setparam": 118}
_AARCH64 |= {"sched_setscheduler": 119, "sched_setaffinity": 122, "setpriority": 140}
_AARCH64 |= {"mq_open": 180, "socket": 198, "add_key": 217, "request_key": 218}
_AARCH64 |= {"keyctl": 219, "perf_event_open": 241, "prlimit64": 261}
_AARCH64 |= {"fanotify_init": 262, "fanotify_mark": 263, "sched_setattr": 274}
_AARCH64 |= {"memfd_create": 279, "bpf": 280, "userfaultfd": 282}
# Machine -> the kernel's name of its calls, and their numbers.
_MACHINES = {"x86_64": (0xC000003E, _COMMON | _X86_64), "aarch64": (0xC00000B7, _COMMON | _AARCH64)}
# Numbers from here on are those of the x32 interface.
_X32_CALLS = 0x40000000

# Instructions of a filter, <linux/filter.h> and <linux/seccomp.h>.
_LOAD, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24

_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522


def machine_is_known() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def filter_program(machine: str | None = None) -> bytes:
    """Returns the filter for `machine`, None for this machine, in the kernel's binary form."""
    kernels_name, numbers = _MACHINES[machine or platform.machine()]
    code = [_load(_MACHINE_AT), _jump(_EQUALS, kernels_name, if_not=0, if_so=1), _give(_KILL)]
    code += [_load(_NUMBER_AT)]
    refused, without_marks = _ERROR | errno.EPERM, _ERROR | errno.EOPNOTSUPP
    code += [_jump(_AT_LEAST, _X32_CALLS, if_so=0, if_not=1), _give(refused)]
    groups = ((_PRETENDED, _ERROR), (_REFUSED, refused), (_OF_MARKS, without_marks))
    for names, result in groups:
        for name in names:
            if name in numbers:
                code += [_jump(_EQUALS, numbers[name], if_so=0, if_not=1), _give(result)]
    for name in _OF_ITSELF:
        code += _if_called(numbers[name], allowed=(0,))
    code += _if_called(numbers["socket"], allowed=_SOCKET_FAMILIES)
    for command in _FCNTL_REFUSED:
        code += [_jump(_EQUALS, numbers["fcntl"], if_so=0, if_not=4), _load(_SECOND_ARGUMENT_AT)]
        code += [_jump(_EQUALS, command, if_so=0, if_not=1), _give(refused), _load(_NUMBER_AT)]
    return b"".join([*code, _give(_ALLOW)])


def give_up_privileges() -> None:
    """Drops all capabilities and sets no_new_privs, for this process and all its children.

    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def install(program: bytes) -> None:
    """Applies a filter to this process and all its children; the filter cannot be removed.

    Raises OSError if the kernel refuses the filter.
    """
    code = ctypes.create_string_buffer(program, len(program))
    size = struct.calcsize("HBBI")
    described = struct.pack("HxxxxxxQ", len(program) // size, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def _if_called(number: int, *, allowed: Sequence[int]) -> list[bytes]:
    """Returns BPF instructions that refuse call `number` unless its first argument is allowed."""
    checks = [
        _jump(_EQUALS, value, if_so=len(allowed) - index, if_not=0)
        for index, value in enumerate(allowed)
    ]
    body = [_load(_FIRST_ARGUMENT_AT), *checks, _give(_ERROR | errno.EPERM), _give(_ALLOW)]
    return [_jump(_EQUALS, number, if_so=0, if_not=len(body)), *body]


def _load(place: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, place)


def _jump(test: int, value: int, *, if_so: int, if_not: int) -> bytes:
    return struct.pack("HBBI", test, if_so, if_not, value)


def _give(result: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, result)


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
