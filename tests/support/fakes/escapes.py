"""Programs that try to get out of a sandbox. Each prints `escaped` if it did what it tried."""

# What each program begins with. `given` names things outside; `there` says whether a call worked.
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
    "ask_for_interfaces": ("there(lambda: bound(socket.AF_NETLINK, (0, 0), socket.SOCK_RAW))"),
}
KERNEL = {
    "memory_of_no_process": "there(lambda: os.memfd_create('x'))",
    "make_a_pipe_with_a_name": "there(lambda: os.mkfifo('fifo'))",
    "leave_system_v_shared_memory": "libc.shmget(given['shm_key'], 4096, 0o1600)",
}
WORK_OUTSIDE = FILES | PROCESSES | NETWORK | KERNEL

# Escapes that need a port to listen on, root, or a kernel that allows them.
MAY_FAIL_OUTSIDE = {
    "signal_all": "quietly(lambda: os.kill(-1, signal.SIGWINCH))",
    "read_a_mark": "there(lambda: os.getxattr(given['secret'], 'user.known'))",
    "list_marks": "there(lambda: 'user.known' in os.listxattr(given['secret']))",
    # Whoever opens such a file waits for lease-break-time, 45 s: 1024 is F_SETLEASE.
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
    "end_the_parent": ("there(lambda: os.getppid() > 1 and os.kill(os.getppid(), signal.SIGKILL))"),
    "take_a_descriptor_of_another": (
        "there(lambda: call(438, os.pidfd_open(given['victim']), 0, 0))"
    ),
    "inherit_a_file": "there(lambda: any(map(is_open, range(3, 256))))",
    "be_another_user": "there(lambda: os.setuid(1))",
    "change_the_root": "there(lambda: os.chroot('/usr'))",
    "mount": "there(lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))",
    "make_a_namespace": "there(lambda: libc.unshare(0x10000000))",
    "make_a_network": "there(lambda: libc.unshare(0x40000000))",
    "make_a_device": ("there(lambda: os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0)))"),
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
