"""The filter of system calls of a program in a sandbox, which only the kernel enforces.

The filter allows the calls of `call_table`, some of them only with certain arguments. Landlock, and
so sandlock, still lets a program of the same user
- use sockets other than plain TCP: multipath TCP, TCP fast open, listening without a bound port;
- change the mode, owner, times and flags of files that it can only read;
- read extended attributes of files, and watch names, in folders that it cannot read;
- block whoever opens a file;
- change the limits of processes outside the sandbox, and learn about them;
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

from slipstream.environments.sandbox.call_table import CALLS, MACHINES, Rule

# Flags of clone, <linux/sched.h>: all but those that make namespaces or trace.
_CLONE_FLAGS = 0x81FD5FFF
# Commands of fcntl, <fcntl.h>: descriptors, their flags, locks, seals. Others block, signal or
# watch other processes, or take pages of pipes that all processes of the user share.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1027, 1028, 1030, 1032, 1034)
# Requests of ioctl: whether it is a terminal and its size, FIONREAD, FIONBIO, close-on-exec, clones
# of files. Others change flags of files, or type into terminals.
_IOCTL_REQUESTS = (
    0x5401,
    0x802C542A,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
    0x40049409,
    0x4020940D,
)
# Options of prctl: the signal at the parent's end, dumps, capabilities' bounds, names of threads
# and memory, timer slack, reapers, no_new_privs, huge pages, the auxiliary vector.
_PRCTL_OPTIONS: tuple[int, ...] = (
    1,
    2,
    3,
    4,
    15,
    16,
    21,
    23,
    29,
    30,
    36,
    37,
    38,
    39,
    41,
    42,
    51,
    56,
)
_PRCTL_OPTIONS += (0x53564D41, 0x41555856)
_AF_UNIX = 1
_AF_INET = 2
_SOCK_STREAM = 1
_SOCK_SEQPACKET = 5
# SOCK_NONBLOCK and SOCK_CLOEXEC, beside the type of a socket.
_SOCKET_FLAGS = 0x80800
# IPPROTO_IP, which is TCP for a stream, and IPPROTO_TCP.
_TCP = (0, 6)
# MSG_DONTROUTE, MSG_DONTWAIT, MSG_EOR, MSG_NOSIGNAL and MSG_MORE; not MSG_FASTOPEN.
_SEND_FLAGS = 0xC0C4
_SOL_SOCKET = 1
_SOL_TCP = 6
# Level -> options: reuse, broadcast, keep-alive, urgent data, lingering, time limits; of TCP no
# delay, cork, keep-alive, quick answers, time limit, low water.
_SOCKET_OPTIONS = {
    _SOL_SOCKET: (2, 6, 9, 10, 13, 20, 21, 66, 67),
    _SOL_TCP: (1, 3, 4, 5, 6, 12, 18, 25),
}
# SO_SNDBUF and SO_RCVBUF report success, and buffers keep the size that the kernel gives them.
_PRETENDED_OPTIONS = {_SOL_SOCKET: (7, 8), _SOL_TCP: ()}

# Numbers from here on are those of the x32 interface.
_X32_CALLS = 0x40000000

# Instructions of a filter, <linux/filter.h> and <linux/seccomp.h>.
_LOAD = 0x20
_AND = 0x54
_RETURN = 0x06
_EQUALS = 0x15
_AT_LEAST = 0x35
_HAS_BITS = 0x45
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000
_NUMBER_AT = 0
_MACHINE_AT = 4
_ARGUMENTS_AT = 16
_WORD_BITS = 0xFFFFFFFF

_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522
# Past all numbers of open files.
_PAST_FILES = 1 << 20
# Becomes the account of its third argument and limits threads to its second, unless these are 0,
# enters the folder of its fourth, closes files, puts the filter of its first, in hexadecimal, on
# its own process, and then becomes the program of the other arguments. Python ignores two signals,
# which the program must not inherit.
FILTERED_START = f"""
import ctypes, os, resource, sys
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal
program = bytes.fromhex(sys.argv[1])
threads = int(sys.argv[2])
account = int(sys.argv[3])
folder = sys.argv[4]
command = sys.argv[5:]
for number in (SIGPIPE, SIGXFSZ):
    signal(number, SIG_DFL)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
if account:
    os.setgroups([])
    os.setresgid(account, account, account)
    os.setresuid(account, account, account)
    if libc.capset({struct.pack("Ii", _CAPABILITY_VERSION, 0)!r}, bytes(24)):
        sys.exit(f"capset: {{os.strerror(ctypes.get_errno())}}")
if threads:
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
os.chdir(folder)
os.closerange(3, {_PAST_FILES})
described = Filter(len(program) // {struct.calcsize("HBBI")}, program)
if libc.prctl({_PR_SET_SECCOMP}, {_SECCOMP_MODE_FILTER}, ctypes.byref(described), 0, 0):
    sys.exit(f"seccomp: {{os.strerror(ctypes.get_errno())}}")
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"{{command[0]}}: {{error.strerror}}", file=sys.stderr)
    sys.exit(127)
"""


def machine_is_known() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def filter_program(machine: str | None = None, *, with_port: bool = False) -> bytes:
    """Returns the filter for `machine`, None for this machine, in the kernel's binary form.

    `with_port` allows clients of TCP. The filter does not see addresses: sandlock judges them.
    """
    machine = machine or platform.machine()
    code = [
        _load(_MACHINE_AT),
        _jump(_EQUALS, MACHINES[machine], if_so=1, if_not=0),
        _give(_KILL),
        _load(_NUMBER_AT),
        _jump(_AT_LEAST, _X32_CALLS, if_so=0, if_not=1),
        _give(_error(errno.ENOSYS)),
    ]
    for call in CALLS:
        if (number := call.numbers.get(machine)) is not None:
            answer = _answer(call.rule, with_port=with_port)
            code += [_jump(_EQUALS, number, if_so=0, if_not=len(answer)), *answer]
    return b"".join([*code, _give(_error(errno.ENOSYS))])


def filtered(
    command: Sequence[str],
    folder: str,
    *,
    threads: int = 0,
    account: int = 0,
    with_port: bool = False,
) -> list[str]:
    """Returns a command that puts the filter on itself and then becomes `command` in `folder`.

    Before that it becomes `account` and limits the threads of its user to `threads`; 0 leaves each
    as it is.
    """
    start = [filter_program(with_port=with_port).hex(), str(threads), str(account), folder]
    return [sys.executable, "-I", "-S", "-c", FILTERED_START, *start, *command]


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


def _answer(rule: Rule, *, with_port: bool) -> list[bytes]:
    """Returns instructions that end the filter for a call with this rule."""
    checks: list[bytes]
    match rule:
        case Rule.PRETENDED:
            return [_give(_ERROR)]
        case Rule.UNSUPPORTED:
            return [_give(_error(errno.EOPNOTSUPP))]
        case Rule.SETSOCKOPT:
            return _option_answer()
        case Rule.SOCKET if not with_port:
            return [_give(_error(errno.EAFNOSUPPORT))]
        case Rule.WITH_PORT if not with_port:
            return [_give(_error(errno.EPERM))]
        case Rule.ALLOWED | Rule.WITH_PORT:
            checks = []
        case Rule.OWN_PROCESS:
            checks = _unless_among(0, (0,), errno.EPERM)
        case Rule.GETPRIORITY:
            # PRIO_PROCESS of the caller.
            checks = _unless_among(0, (0,), errno.EPERM) + _unless_among(1, (0,), errno.EPERM)
        case Rule.CLONE:
            checks = _unless_within(0, _CLONE_FLAGS, errno.EPERM)
        case Rule.FCNTL:
            checks = _unless_among(1, _FCNTL_COMMANDS, errno.EINVAL)
        case Rule.IOCTL:
            checks = _unless_among(1, _IOCTL_REQUESTS, errno.ENOTTY)
        case Rule.PRCTL:
            checks = _unless_among(0, _PRCTL_OPTIONS, errno.EINVAL)
        case Rule.SOCKET:
            checks = _unless_socket((_AF_INET,), (_SOCK_STREAM,), _TCP)
        case Rule.SOCKETPAIR:
            # A pair of datagrams could be sent elsewhere.
            checks = _unless_socket((_AF_UNIX,), (_SOCK_STREAM, _SOCK_SEQPACKET), (0,))
        case Rule.SENDTO:
            no_address = _unless_among(4, (0,), errno.EPERM, is_pointer=True)
            checks = no_address + _unless_within(3, _SEND_FLAGS, errno.EOPNOTSUPP)
        case Rule.SENDMSG:
            # An address in the message means nothing to a connected socket without fast open.
            checks = _unless_within(2, _SEND_FLAGS, errno.EOPNOTSUPP)
        case Rule.SENDMMSG:
            checks = _unless_within(3, _SEND_FLAGS, errno.EOPNOTSUPP)
    return [*checks, _give(_ALLOW)]


def _option_answer() -> list[bytes]:
    """Returns instructions for setsockopt, whose arguments 1 and 2 are level and option."""
    code = []
    for level, options in _SOCKET_OPTIONS.items():
        checks = _if_among(2, options, _ALLOW) + _if_among(2, _PRETENDED_OPTIONS[level], _ERROR)
        of_level = _jump(_EQUALS, level, if_so=0, if_not=len(checks))
        code += [_load_argument(1), of_level, *checks]
    return [*code, _give(_error(errno.ENOPROTOOPT))]


def _unless_socket(
    families: Sequence[int], kinds: Sequence[int], protocols: Sequence[int]
) -> list[bytes]:
    """Returns instructions that refuse a socket of another family, type or protocol."""
    refused = errno.EAFNOSUPPORT
    return [
        *_unless_among(0, families, refused),
        *_unless_among(1, kinds, refused, mask=_WORD_BITS & ~_SOCKET_FLAGS),
        *_unless_among(2, protocols, refused),
    ]


def _unless_among(
    argument: int,
    values: Sequence[int],
    error: int,
    *,
    mask: int = _WORD_BITS,
    is_pointer: bool = False,
) -> list[bytes]:
    """Returns instructions that end with `error` unless an argument is one of `values`.

    The kernel takes arguments as 32 bits, which are all that is compared, but for pointers, whose
    upper 32 bits must be 0.
    """
    checks = [
        _jump(_EQUALS, value, if_so=len(values) - index, if_not=0)
        for index, value in enumerate(values)
    ]
    masked = struct.pack("HBBI", _AND, 0, 0, mask)
    code = [_load_argument(argument), masked, *checks, _give(_error(error))]
    if is_pointer:
        upper = _load(_ARGUMENTS_AT + 8 * argument + 4)
        code += [upper, _jump(_EQUALS, 0, if_so=1, if_not=0), _give(_error(error))]
    return code


def _unless_within(argument: int, bits: int, error: int) -> list[bytes]:
    """Returns instructions that end with `error` if an argument has a bit outside `bits`."""
    other_bits = _WORD_BITS & ~bits
    outside = _jump(_HAS_BITS, other_bits, if_so=0, if_not=1)
    return [_load_argument(argument), outside, _give(_error(error))]


def _if_among(argument: int, values: Sequence[int], result: int) -> list[bytes]:
    """Returns instructions that end with `result` if an argument is one of `values`."""
    code = [_load_argument(argument)]
    for value in values:
        code += [_jump(_EQUALS, value, if_so=0, if_not=1), _give(result)]
    return code


def _load_argument(argument: int) -> bytes:
    """Returns the instruction that loads the lower 32 bits; both machines are little-endian."""
    return _load(_ARGUMENTS_AT + 8 * argument)


def _load(place: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, place)


def _jump(test: int, value: int, *, if_so: int, if_not: int) -> bytes:
    return struct.pack("HBBI", test, if_so, if_not, value)


def _give(result: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, result)


def _error(number: int) -> int:
    return _ERROR | number


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
