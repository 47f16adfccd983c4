"""Programs that try to get out of a sandbox. Each prints `escaped` if it did what it tried."""

# The beginning of each program. `given` names things outside; `there` says whether a call worked.
# A program without `there` is judged by what it has done outside.
BEGINNING = """
import ctypes, json, os, resource, signal, socket, stat, sys, time
given = json.load(open("given.json"))
libc = ctypes.CDLL(None, use_errno=True)
def there(attempt):
    try:
        result = attempt()
    except (OSError, ValueError):
        return
    if result is not False and result != -1:
        print("escaped", flush=True)
def quietly(attempt):
    try:
        attempt()
    except OSError:
        pass
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
def call(number, *arguments):
    return libc.syscall(number, *arguments)
def stream(family, address):
    with socket.socket(family) as s:
        s.settimeout(5)
        s.connect(address)
def datagram(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.sendto(b"out", address)
def bound(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as s:
        s.bind(address)
def listens(protocol):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as s:
        s.listen()
        return s.getsockname()[1] > 0
def connected(family, host, protocol):
    with socket.socket(family, socket.SOCK_STREAM, protocol) as s:
        s.settimeout(5)
        s.connect((host, given["tcp"]))
def datagram_pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
class Part(ctypes.Structure):
    _fields_ = [("start", ctypes.c_char_p), ("length", ctypes.c_size_t)]
class Message(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("name_length", ctypes.c_uint),
        ("parts", ctypes.POINTER(Part)), ("num_parts", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_size_t), ("num_bytes", ctypes.c_size_t),
    ]
MPTCP, UDP_LITE, FAST_OPEN = 262, 136, 0x20000000
TCP_FASTOPEN_CONNECT = 30
"""

# Escapes that work without a sandbox, for any user.
FILES = {
    "read_etc_passwd": "there(lambda: open('/etc/passwd').read())",
    "read_a_secret": "there(lambda: open(given['secret']).read())",
    "list_a_home": "there(lambda: os.listdir(given['home']))",
    "write_outside": "there(lambda: open(given['home'] + '/new', 'w').write('x'))",
    "append_outside": "there(lambda: open(given['secret'], 'a').write('x'))",
    "truncate_outside": "there(lambda: os.truncate(given['secret'], 0))",
    "make_a_folder_outside": "there(lambda: os.mkdir(given['home'] + '/folder'))",
    "remove_outside": "there(lambda: os.unlink(given['secret']))",
    "read_through_a_symlink": (
        "os.symlink(given['secret'], 'link')\nthere(lambda: open('link').read())"
    ),
    "read_through_a_hardlink": (
        "there(lambda: (os.link(given['secret'], 'link'), open('link').read())[1])"
    ),
    "move_in": "there(lambda: os.rename(given['secret'], 'moved'))",
    "move_out": "open('mine', 'w')\nthere(lambda: os.rename('mine', given['home'] + '/moved'))",
    "change_a_mode": (
        "there(lambda: os.chmod(given['secret'], 0o777) or "
        "stat.S_IMODE(os.stat(given['secret']).st_mode) == 0o777)"
    ),
    "change_a_time": (
        "there(lambda: os.utime(given['secret'], (1, 1)) or os.stat(given['secret']).st_mtime == 1)"
    ),
    "leave_a_file_in_shared_memory": "there(lambda: open(given['shared'], 'w').write('x'))",
    "watch_a_folder": (
        "there(lambda: libc.inotify_add_watch(libc.inotify_init1(0), given['home'].encode(), 4095))"
    ),
}
PROCESSES = {
    "read_variables": "there(lambda: 'SLIPSTREAM_ESCAPE' in os.environ)",
    "read_variables_of_another": (
        "there(lambda: open(f\"/proc/{given['victim']}/environ\").read())"
    ),
    "list_processes": "there(lambda: any(name.isdigit() for name in os.listdir('/proc')))",
    "end_another": "there(lambda: os.kill(given['victim'], 9))",
    "stop_another": "there(lambda: os.kill(given['victim'], signal.SIGSTOP))",
    "signal_by_descriptor": (
        "there(lambda: signal.pidfd_send_signal(os.pidfd_open(given['victim']), 9))"
    ),
    "queue_a_signal": (
        "facts = (9).to_bytes(4, 'little') + bytes(4) + (-1).to_bytes(4, 'little', signed=True)\n"
        "facts = ctypes.create_string_buffer(facts, 128)\n"
        "there(lambda: call(given['rt_sigqueueinfo'], given['victim'], 9, facts))"
    ),
    "limit_another": (
        "there(lambda: resource.prlimit(given['victim'], resource.RLIMIT_CPU, (1, 1)))"
    ),
    "pin_another": "there(lambda: os.sched_setaffinity(given['victim'], {0}))",
    "slow_another": "there(lambda: os.setpriority(os.PRIO_PROCESS, given['victim'], 19))",
    "end_a_thread_of_another": "there(lambda: libc.tgkill(given['victim'], given['victim'], 9))",
    "queue_a_signal_to_a_thread": (
        "facts = (9).to_bytes(4, 'little') + bytes(4) + (-1).to_bytes(4, 'little', signed=True)\n"
        "facts = ctypes.create_string_buffer(facts, 128)\n"
        "victim = given['victim']\n"
        "there(lambda: call(given['rt_tgsigqueueinfo'], victim, victim, 9, facts))"
    ),
    "send_signals_of_a_pipe_to_another": (
        "import fcntl\nthere(lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, given['victim']))"
    ),
    "name_another_by_a_descriptor": "there(lambda: os.pidfd_open(given['victim']))",
    "learn_the_priority_of_another": (
        "there(lambda: os.getpriority(os.PRIO_PROCESS, given['victim']) is not None)"
    ),
    "learn_the_priority_of_a_user": (
        "there(lambda: os.getpriority(os.PRIO_USER, os.getuid()) is not None)"
    ),
    "learn_the_cores_of_another": "there(lambda: os.sched_getaffinity(given['victim']))",
    "learn_the_policy_of_another": "there(lambda: os.sched_getscheduler(given['victim']))",
    "learn_the_parameters_of_another": "there(lambda: os.sched_getparam(given['victim']))",
    "learn_the_time_slice_of_another": (
        "there(lambda: os.sched_rr_get_interval(given['victim']) is not None)"
    ),
    "learn_the_attributes_of_another": (
        "facts = ctypes.create_string_buffer(56)\n"
        "there(lambda: call(given['sched_getattr'], given['victim'], facts, 56, 0))"
    ),
    "learn_the_session_of_another": "there(lambda: os.getsid(given['victim']))",
    "learn_the_disk_priority_of_another": (
        "there(lambda: call(given['ioprio_get'], 1, given['victim']))"
    ),
    "learn_the_capabilities_of_another": (
        "header = (ctypes.c_uint * 2)(0x20080522, given['victim'])\n"
        "there(lambda: libc.capget(header, (ctypes.c_uint * 6)()))"
    ),
    "learn_the_locks_of_another": (
        "place = ctypes.c_void_p()\n"
        "length = ctypes.c_size_t()\n"
        "there(lambda: call(given['get_robust_list'], given['victim'], "
        "ctypes.byref(place), ctypes.byref(length)))"
    ),
}
NETWORK = {
    "connect_by_tcp": "there(lambda: stream(socket.AF_INET, ('127.0.0.1', given['tcp'])))",
    "send_by_udp": "quietly(lambda: datagram(socket.AF_INET, ('127.0.0.1', given['udp'])))",
    "connect_to_a_unix_socket": "there(lambda: stream(socket.AF_UNIX, given['unix']))",
    "send_to_a_unix_socket": "there(lambda: datagram(socket.AF_UNIX, given['unix_datagram']))",
    "connect_to_an_abstract_socket": (
        "there(lambda: stream(socket.AF_UNIX, chr(0) + given['abstract']))"
    ),
    "send_to_an_abstract_socket": (
        "there(lambda: datagram(socket.AF_UNIX, chr(0) + given['abstract'] + '-datagram'))"
    ),
    "ask_for_interfaces": (
        "there(lambda: bound(socket.AF_NETLINK, (0, 0), socket.SOCK_RAW))"
    ),
    "fast_open": (
        "there(lambda: socket.socket().sendto(b'out', FAST_OPEN, ('127.0.0.1', given['tcp'])))"
    ),
    "fast_open_by_a_message": (
        "address = ('127.0.0.1', given['tcp'])\n"
        "there(lambda: socket.socket().sendmsg([b'out'], [], FAST_OPEN, address))"
    ),
    "fast_open_by_many_messages": (
        "def attempt():\n"
        "    s = socket.socket()\n"
        "    address = socket.AF_INET.to_bytes(2, sys.byteorder)\n"
        "    address += given['tcp'].to_bytes(2, 'big')\n"
        "    address += socket.inet_aton('127.0.0.1') + bytes(8)\n"
        "    parts = Part(b'out', 3)\n"
        "    messages = Message(address, 16, ctypes.pointer(parts), 1)\n"
        "    return libc.sendmmsg(s.fileno(), ctypes.byref(messages), 1, FAST_OPEN)\n"
        "there(attempt)"
    ),
    "fast_open_by_an_option": (
        "def attempt():\n"
        "    s = socket.socket()\n"
        "    s.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)\n"
        "    s.connect(('127.0.0.1', given['tcp']))\n"
        "    return s.send(b'out')\n"
        "there(attempt)"
    ),
    "listen_without_a_bound_port": "there(lambda: listens(0))",
    "bind_a_port": "there(lambda: bound(socket.AF_INET, ('127.0.0.1', 0)))",
    "bind_a_port_of_udp": (
        "there(lambda: bound(socket.AF_INET, ('127.0.0.1', 0), socket.SOCK_DGRAM))"
    ),
    "connect_through_a_symlink_to_a_unix_socket": (
        "os.symlink(given['unix'], 'link')\nthere(lambda: stream(socket.AF_UNIX, 'link'))"
    ),
    "listen_at_a_unix_socket": "there(lambda: bound(socket.AF_UNIX, 'own'))",
    "send_elsewhere_from_a_pair": (
        "there(lambda: datagram_pair()[0].sendto(b'out', given['unix_datagram']))"
    ),
    "connect_a_pair_elsewhere": (
        "def attempt():\n"
        "    s = datagram_pair()[0]\n"
        "    s.connect(given['unix_datagram'])\n"
        "    return s.send(b'out')\n"
        "there(attempt)"
    ),
    "send_a_message_elsewhere_from_a_pair": (
        "there(lambda: datagram_pair()[0].sendmsg([b'out'], [], 0, given['unix_datagram']))"
    ),
}
# Protocols and families that a kernel may lack.
RARE_NETWORK = {
    "connect_by_multipath_tcp": "there(lambda: connected(socket.AF_INET, '127.0.0.1', MPTCP))",
    "connect_by_multipath_tcp_of_ipv6": (
        "there(lambda: connected(socket.AF_INET6, '::ffff:127.0.0.1', MPTCP))"
    ),
    "connect_by_ipv6": "there(lambda: connected(socket.AF_INET6, '::ffff:127.0.0.1', 0))",
    "multipath_tcp_and_fast_open": (
        "there(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP)"
        ".sendto(b'out', FAST_OPEN, ('127.0.0.1', given['tcp'])))"
    ),
    "listen_by_multipath_tcp": "there(lambda: listens(MPTCP))",
    "send_by_udp_lite": (
        "there(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, UDP_LITE)"
        ".sendto(b'out', ('127.0.0.1', given['udp'])))"
    ),
    "ping": (
        "there(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP))"
    ),
    # SCTP, DCCP.
    "other_protocols": (
        "for kind, protocol in ((1, 132), (5, 132), (6, 33)):\n"
        "    there(lambda: socket.socket(socket.AF_INET, kind, protocol))"
    ),
    "other_families": (
        "for family in (*range(3, 10), *range(11, 64)):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "        there(lambda: socket.socket(family, kind))"
    ),
    "a_socket_by_io_uring": (
        "facts = ctypes.create_string_buffer(120)\nthere(lambda: call(425, 8, facts))"
    ),
}
KERNEL = {
    "memory_of_no_process": "there(lambda: os.memfd_create('x'))",
    "make_a_pipe_with_a_name": "there(lambda: os.mkfifo('fifo'))",
    "leave_system_v_shared_memory": "libc.shmget(given['shm_key'], 4096, 0o1600)",
    "timers_that_no_limit_counts": (
        "there(lambda: libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())))"
    ),
    "large_buffers_of_sockets": (
        "a, b = socket.socketpair()\n"
        "usual = a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)\n"
        "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)\n"
        "there(lambda: a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > usual)"
    ),
    "large_pipes": (
        "import fcntl\nthere(lambda: fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20))"
    ),
    "requests_that_the_machine_counts": (
        "there(lambda: call(given['io_setup'], 16, ctypes.byref(ctypes.c_ulong())))"
    ),
    "memory_that_is_never_swapped": (
        "part = ctypes.create_string_buffer(8192)\nthere(lambda: libc.mlock(part, 4096))"
    ),
    "flags_of_a_file_that_is_only_read": (
        "import fcntl\n"
        "with open(given['readable']) as file:\n"
        "    flags = ctypes.c_int()\n"
        "    quietly(lambda: fcntl.ioctl(file, 0x80086601, flags))\n"
        "    flags.value ^= 0x40\n"
        "    there(lambda: fcntl.ioctl(file, 0x40086602, flags))"
    ),
    "handles_of_files": (
        "handle = (ctypes.c_uint * 40)(128)\n"
        "number = ctypes.c_int()\n"
        "name = given['secret'].encode()\n"
        "there(lambda: call("
        "given['name_to_handle_at'], -100, name, handle, ctypes.byref(number), 0))"
    ),
    "open_in_another_way": (
        "how = (ctypes.c_uint64 * 3)()\n"
        "there(lambda: call(437, -100, given['secret'].encode(), how, 24))"
    ),
    "take_a_part_of_the_mounts": (
        "there(lambda: call(428, -100, given['home'].encode(), 0))"
    ),
    "pages_of_a_file_in_memory": (
        "import mmap\n"
        "with open(given['readable']) as file:\n"
        "    pages = mmap.mmap(file.fileno(), 4, flags=mmap.MAP_PRIVATE)\n"
        "    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))\n"
        "    there(lambda: libc.mincore(ctypes.c_void_p(at), 4, (ctypes.c_ubyte * 8)()))"
    ),
}
WORK_OUTSIDE = FILES | PROCESSES | NETWORK | KERNEL

# Escapes that need a port to listen on, root, or a kernel that allows them.
MAY_FAIL_OUTSIDE = RARE_NETWORK | {
    "list_mounts": (
        "asked = (ctypes.c_uint64 * 4)(32, 0xFFFFFFFFFFFFFFFF)\n"
        "there(lambda: call(458, asked, (ctypes.c_uint64 * 64)(), 64, 0) > 0)"
    ),
    "learn_of_a_mount": (
        "asked = (ctypes.c_uint64 * 4)(32, os.statvfs('/').f_fsid, 1)\n"
        "there(lambda: call(457, asked, ctypes.create_string_buffer(4096), 4096, 0))"
    ),
    "pages_in_memory_by_another_call": (
        "with open(given['readable']) as file:\n"
        "    there(lambda: call("
        "451, file.fileno(), (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)(), 0))"
    ),
    "compare_with_another": (
        "there(lambda: call(given['kcmp'], os.getpid(), given['victim'], 0, 0, 0))"
    ),
    "advise_another": (
        "there(lambda: call(440, os.pidfd_open(given['victim']), 0, 0, 20, 0))"
    ),
    "a_namespace_of_users_by_clone": (
        "child = call(given['clone'], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)\n"
        "if child == 0:\n    os._exit(0)\n"
        "there(lambda: child)"
    ),
    "a_namespace_of_users_by_clone3": (
        "child = call(435, (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, signal.SIGCHLD), 88)\n"
        "if child == 0:\n    os._exit(0)\n"
        "there(lambda: child)"
    ),
    "memory_of_nobody": "there(lambda: call(447, 0))",
    "faults_in_user_space": "there(lambda: call(given['userfaultfd'], 1))",
    "a_file_system_of_its_own": "there(lambda: call(430, b'tmpfs', 0))",
    "judge_calls_of_others": "there(lambda: call(given['seccomp'], 1, 8, 0))",
    "signal_all": "quietly(lambda: os.kill(-1, signal.SIGWINCH))",
    "read_a_mark": "there(lambda: os.getxattr(given['secret'], 'user.known'))",
    "list_marks": "there(lambda: 'user.known' in os.listxattr(given['secret']))",
    # A program that opens such a file waits for lease-break-time, 45 s: 1024 is F_SETLEASE.
    "hold_up_readers": (
        "import fcntl\n"
        "there(lambda: fcntl.fcntl(os.open(given['library'], os.O_RDONLY), 1024, fcntl.F_WRLCK))"
    ),
    "hear_of_a_folder": (
        "import fcntl\n"
        "there(lambda: fcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, 4095))"
    ),
    "watch_a_file_system": "there(lambda: libc.fanotify_init(0x200, 0))",
    "mark_a_file": "there(lambda: os.setxattr(given['secret'], 'user.mark', b'x'))",
    "trace_another": "there(lambda: libc.ptrace(16, given['victim'], 0, 0))",
    "read_memory_of_another": (
        "part = ctypes.create_string_buffer(8)\n"
        "vector = (ctypes.c_uint64 * 2)(ctypes.addressof(part), 8)\n"
        "there(lambda: libc.process_vm_readv("
        "given['victim'], vector, 1, (ctypes.c_uint64 * 2)(given['address'], 8), 1, 0))"
    ),
    "end_the_parent": (
        "there(lambda: os.getppid() > 1 and os.kill(os.getppid(), signal.SIGKILL))"
    ),
    "take_a_descriptor_of_another": (
        "there(lambda: call(438, os.pidfd_open(given['victim']), 0, 0))"
    ),
    "inherit_a_file": "there(lambda: any(map(is_open, range(3, 256))))",
    "be_another_user": "there(lambda: os.setuid(1))",
    "change_the_root": "there(lambda: os.chroot('/usr'))",
    "mount": "there(lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))",
    "make_a_namespace": "there(lambda: libc.unshare(0x10000000))",
    "make_a_network": "there(lambda: libc.unshare(0x40000000))",
    "make_a_device": (
        "there(lambda: os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0)))"
    ),
    "set_the_clock": "there(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))",
    "rename_the_machine": "there(lambda: socket.sethostname(socket.gethostname()))",
    "raise_a_limit": "there(lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)))",
    "raise_the_limit_of_files": (
        "there(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)))"
    ),
    "be_first": "there(lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))",
    "be_spared_when_memory_ends": (
        "there(lambda: open('/proc/self/oom_score_adj', 'w').write('-1000'))"
    ),
    "open_a_raw_socket": "there(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))",
    "open_a_packet_socket": "there(lambda: socket.socket(17, socket.SOCK_RAW, 3))",
    "io_uring": "there(lambda: call(425, 4, ctypes.create_string_buffer(120)))",
    "bpf": "there(lambda: call(given['bpf'], 0, ctypes.create_string_buffer(72), 72))",
    "perf": "there(lambda: call(given['perf'], ctypes.create_string_buffer(120), 0, -1, -1, 0))",
    "read_the_kernels_log": "there(lambda: libc.klogctl(10, None, 0))",
    "keys": "there(lambda: call(given['keyctl'], 0, -3, 1))",
    "message_queue": (
        "there(lambda: ctypes.CDLL('librt.so.1', use_errno=True)"
        ".mq_open(b'/slipstream-escape', 0o102, 0o600, None))"
    ),
    "file_handles": "there(lambda: call(given['open_by_handle_at'], -100, None, 0))",
    "restart_the_machine": "there(lambda: call(given['reboot'], 1, 2, 3, 0))",
    "load_a_module": "there(lambda: call(given['init_module'], None, 0, None))",
    "write_into_the_interpreter": "there(lambda: open(sys.executable, 'r+b'))",
    "write_into_the_library": (
        "there(lambda: open(os.path.dirname(os.__file__) + '/escape.py', 'w'))"
    ),
}
