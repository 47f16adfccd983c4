"""The system calls that a program in a sandbox may make, with their numbers.

A call that is not in the table fails as on a kernel that does not have it (ENOSYS): programs and
libraries are prepared for that, and a call that a later kernel adds is refused until somebody has
looked at it. What the table leaves out on purpose has a test among the escapes.
"""

from dataclasses import dataclass
from enum import StrEnum

# Machine of `platform.machine()` -> the kernel's name for its calls, in the order of the table.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class Rule(StrEnum):
    """The condition under which a call of the table passes, or its answer instead."""

    ALLOWED = ""
    # Does nothing and reports success.
    PRETENDED = "pretended"
    # Fails as on a file system without this feature.
    UNSUPPORTED = "unsupported"
    # The first argument is a process: 0, the caller.
    OWN_PROCESS = "own_process"
    # The call passes only where the program may connect to a port.
    WITH_PORT = "with_port"
    # The remaining rules are of the call with the same name.
    CLONE = "clone"
    FCNTL = "fcntl"
    GETPRIORITY = "getpriority"
    IOCTL = "ioctl"
    PRCTL = "prctl"
    SENDMMSG = "sendmmsg"
    SENDMSG = "sendmsg"
    SENDTO = "sendto"
    SETSOCKOPT = "setsockopt"
    SOCKET = "socket"
    SOCKETPAIR = "socketpair"


@dataclass(frozen=True)
class Call:
    """A system call: its number on each of `MACHINES` that has it, and its rule."""

    name: str
    numbers: dict[str, int]
    rule: Rule


# Name, number on x86_64, number on aarch64 ("-": the machine does not have it), rule.
_TABLE = """
# Files and pipes that are open.
read                   0   63
write                  1   64
open                   2    -
openat               257   56
creat                 85    -
close                  3   57
close_range          436  436
lseek                  8   62
pread64               17   67
pwrite64              18   68
readv                 19   65
writev                20   66
preadv               295   69
pwritev              296   70
preadv2              327  286
pwritev2             328  287
sendfile              40   71
splice               275   76
copy_file_range      326  285
dup                   32   23
dup2                  33    -
dup3                 292   24
pipe                  22    -
pipe2                293   59
fcntl                 72   25  fcntl
ioctl                 16   29  ioctl
flock                 73   32
fsync                 74   82
fdatasync             75   83
fadvise64            221  223
fallocate            285   47
truncate              76   45
ftruncate             77   46
umask                 95  166
# Folders, names and facts of files. Landlock or the mounts decide which of these a program may
# reach.
stat                   4    -
lstat                  6    -
fstat                  5   80
newfstatat           262   79
statx                332  291
statfs               137   43
fstatfs              138   44
access                21    -
faccessat            269   48
faccessat2           439  439
readlink              89    -
readlinkat           267   78
getdents              78    -
getdents64           217   61
getcwd                79   17
chdir                 80   49
fchdir                81   50
mkdir                 83    -
mkdirat              258   34
rmdir                 84    -
rename                82    -
renameat             264   38
renameat2            316  276
link                  86    -
linkat               265   37
unlink                87    -
unlinkat             263   35
symlink               88    -
symlinkat            266   36
# Programs that copy files expect that these work, but Landlock lets them change files that the
# program can only read.
chmod                 90    -  pretended
fchmod                91   52  pretended
fchmodat             268   53  pretended
fchmodat2            452  452  pretended
chown                 92    -  pretended
fchown                93   55  pretended
lchown                94    -  pretended
fchownat             260   54  pretended
utime                132    -  pretended
utimes               235    -  pretended
futimesat            261    -  pretended
utimensat            280   88  pretended
# These would write all files of the machine to its disks.
sync                 162   81  pretended
syncfs               306  267  pretended
# Extended attributes: Landlock lets a program read and write those of files that it cannot read.
setxattr             188    5  unsupported
lsetxattr            189    6  unsupported
fsetxattr            190    7  unsupported
setxattrat           463  463  unsupported
getxattr             191    8  unsupported
lgetxattr            192    9  unsupported
fgetxattr            193   10  unsupported
getxattrat           464  464  unsupported
listxattr            194   11  unsupported
llistxattr           195   12  unsupported
flistxattr           196   13  unsupported
listxattrat          465  465  unsupported
removexattr          197   14  unsupported
lremovexattr         198   15  unsupported
fremovexattr         199   16  unsupported
removexattrat        466  466  unsupported
# Memory of the process itself.
brk                   12  214
mmap                   9  222
mremap                25  216
munmap                11  215
mprotect              10  226
madvise               28  233
msync                 26  227
membarrier           324  283
mseal                462  462
pkey_alloc           330  289
pkey_free            331  290
pkey_mprotect        329  288
# Waiting. A timer of timer_create belongs to no process that a limit counts: timerfd and
# setitimer are enough.
poll                   7    -
ppoll                271   73
select                23    -
pselect6             270   72
epoll_create         213    -
epoll_create1        291   20
epoll_ctl            233   21
epoll_wait           232    -
epoll_pwait          281   22
epoll_pwait2         441  441
eventfd              284    -
eventfd2             290   19
signalfd             282    -
signalfd4            289   74
timerfd_create       283   85
timerfd_settime      286   86
timerfd_gettime      287   87
setitimer             38  103
getitimer             36  102
alarm                 37    -
pause                 34    -
nanosleep             35  101
clock_nanosleep      230  115
restart_syscall      219  128
futex                202   98
futex_waitv          449  449
futex_wait           455  455
futex_wake           454  454
futex_requeue        456  456
set_robust_list      273   99
rseq                 334  293
# Processes. clone3 has its flags in memory, where no filter sees them: without it the C library
# calls clone.
clone                 56  220  clone
fork                  57    -
vfork                 58    -
execve                59  221
exit                  60   93
exit_group           231   94
wait4                 61  260
waitid               247   95
set_tid_address      218   96
arch_prctl           158    -
prctl                157  167  prctl
getpid                39  172
getppid              110  173
gettid               186  178
getpgid              121  155
getpgrp              111    -
getsid               124  156  own_process
setpgid              109  154
setsid               112  157
getuid               102  174
geteuid              107  175
getgid               104  176
getegid              108  177
getresuid            118  148
getresgid            120  150
getgroups            115  158
getrlimit             97  163
setrlimit            160  164
prlimit64            302  261  own_process
getrusage             98  165
times                100  153
sysinfo               99  179
uname                 63  160
# Signals.
kill                  62  129
tkill                200  130
tgkill               234  131
rt_sigaction          13  134
rt_sigprocmask        14  135
rt_sigpending        127  136
rt_sigtimedwait      128  137
rt_sigsuspend        130  133
rt_sigreturn          15  139
sigaltstack          131  132
# Scheduling of the process itself.
sched_yield           24  124
getcpu               309  168
sched_get_priority_max 146  125
sched_get_priority_min 147  126
sched_getaffinity    204  123  own_process
sched_setaffinity    203  122  own_process
sched_getparam       143  121  own_process
sched_setparam       142  118  own_process
sched_getscheduler   145  120  own_process
sched_setscheduler   144  119  own_process
sched_getattr        315  275  own_process
sched_setattr        314  274  own_process
getpriority          140  141  getpriority
# Clocks and random numbers.
time                 201    -
gettimeofday          96  169
clock_gettime        228  113
clock_getres         229  114
getrandom            318  278
# Sockets: a pair that is connected, and where a port is allowed a client of TCP. Nothing listens.
socketpair            53  199  socketpair
socket                41  198  socket
connect               42  203  with_port
sendto                44  206  sendto
sendmsg               46  211  sendmsg
sendmmsg             307  269  sendmmsg
recvfrom              45  207
recvmsg               47  212
recvmmsg             299  243
shutdown              48  210
getsockname           51  204
getpeername           52  205
setsockopt            54  208  setsockopt
getsockopt            55  209
"""


def _calls() -> tuple[Call, ...]:
    calls = []
    for line in _TABLE.splitlines():
        if line and not line.startswith("#"):
            name, *fields = line.split()
            numbers = dict(zip(MACHINES, fields, strict=False))
            call_numbers = {
                machine: int(number) for machine, number in numbers.items() if number != "-"
            }
            calls.append(Call(name, call_numbers, Rule("".join(fields[len(MACHINES) :]))))
    return tuple(calls)


CALLS = _calls()
