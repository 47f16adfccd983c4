"""The sandboxes as users call them: what programs see, what ends them, and what is refused."""

import ast
import asyncio
import math
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from slipstream.core.errors import ConfigError
from slipstream.environments.sandbox import Finished, Limits, Sandbox, sandbox
from slipstream.environments.sandbox.sandbox import (
    BACKENDS,
    bounds_threads,
    first_backend,
    trial,
    why_not,
)
from slipstream.environments.sandbox.system_calls import filter_program
from slipstream.environments.sandbox.thread_limit import OWN_THREADS, gives_accounts
from support.rigs.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux"),
]

# Enough for what the tests do on a busy machine; each test lowers the limit that it is about.
LIMITS = Limits(seconds=60, processor_s=60)
MARK = f"a-program-of-{os.getpid()}"
# The program `sleep` is given this: no other one sleeps exactly so long.
A_TIME = f"3600.{os.getpid()}"


async def run(backend: str, program: str, **limits: float) -> Finished:
    finished = await Sandbox(replace(LIMITS, **limits), backend=backend).run(program)
    assert b"escaped" not in finished.stdout, finished
    return finished


def marked(mark: str, name: str = "") -> list[str]:
    """Processes of the machine with an argument, and perhaps a name."""
    return [
        str(process)
        for process in psutil.process_iter(["cmdline", "name"])
        if mark in (process.info["cmdline"] or []) and name in process.info["name"]
    ]


async def test_a_program_sees_its_folder_and_stdin_and_nothing_else(
    backend, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    program = (
        "import os, sys\n"
        "print(sorted(os.environ), sorted(os.listdir()), open('a/b').read(), sys.stdin.read())\n"
        "print('words', file=sys.stderr)\n"
        "assert os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd()\n"
        "sys.exit(7)\n"
    )
    finished = await Sandbox(LIMITS, backend=backend).run(
        program, files={"a/b": b"inside"}, stdin=b"given"
    )
    variables, rest = finished.stdout.decode().split("] ", 1)
    seen = set(ast.literal_eval(variables + "]"))
    assert seen <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "TMPDIR"}
    assert rest == "['__main__.py', 'a'] inside given\n"
    assert (finished.status, finished.stderr, finished.ended_by) == (7, b"words\n", "")


async def test_a_command_runs_and_nothing_is_left_of_its_folder(backend: str) -> None:
    finished = await Sandbox(LIMITS, backend=backend).run(
        ["sh", "-c", "mkdir -p x/y; pwd"]
    )
    folder = finished.stdout.decode().strip()
    assert finished.status == 0
    assert "slipstream-sandbox-" in folder
    assert not Path(folder).exists()


async def test_the_folder_is_writable_and_common_calls_work(backend: str) -> None:
    program = (
        "import os, shutil, subprocess, sys, tempfile, threading\n"
        "open('a', 'w').write('x' * 1000)\n"
        "shutil.copy2('a', 'b'); os.rename('b', 'c'); os.remove('a')\n"
        "with tempfile.TemporaryDirectory() as folder: open(folder + '/d', 'w')\n"
        "done = subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, "
        "stdin=subprocess.DEVNULL)\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "print(done.stdout, os.listdir('.'), os.urandom(2) != None)\n"
    )
    finished = await run(backend, program)
    assert finished.stderr == b""
    assert finished.stdout == b"thread\nb'1\\n' ['c', '__main__.py'] True\n" or (
        finished.stdout == b"thread\nb'1\\n' ['__main__.py', 'c'] True\n"
    )


# Program, the limits, and what may have ended it.
ENDED = {
    "busy_loop": ("while True: pass", {"seconds": 1}, {"seconds"}),
    "processor_time": ("while True: pass", {"processor_s": 1}, {"processor_s"}),
    "processor_time_and_deaf": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {"processor_s": 1},
        {"kill"},
    ),
    "sleep": ("import time; time.sleep(3600)", {"seconds": 1}, {"seconds"}),
    "deaf": (
        "import signal, time\nfor number in range(1, 32):\n"
        "    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "time.sleep(3600)",
        {"seconds": 1},
        {"seconds"},
    ),
    "reader_of_stdin_for_ever": (
        "import time\nwhile True: open('x', 'w').write('y'); time.sleep(0.01)",
        {"seconds": 1},
        {"seconds"},
    ),
    "output": (
        "while True: print('x' * 1000)",
        {"output_bytes": 10_000},
        {"output_bytes"},
    ),
    "errors": (
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
        {"output_bytes": 10_000},
        {"output_bytes"},
    ),
    "disk": (
        "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').write(bytes(1 << 20))",
        {"folder_bytes": 20 << 20},
        {"folder_bytes"},
    ),
    "many_files": (
        "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').close()",
        {},
        {"folder_files"},
    ),
    "deep_folders": (
        "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
        {},
        {"folder_files"},
    ),
}


@pytest.mark.long
async def test_a_program_at_a_limit_is_ended_and_the_limit_named(backend: str) -> None:
    # Side by side: most of them wait for a second.
    results = await asyncio.gather(
        *(run(backend, program, **limits) for program, limits, _ in ENDED.values())
    )
    for name, (_, _, ended_by), finished in zip(
        ENDED, ENDED.values(), results, strict=True
    ):
        assert finished.ended_by in ended_by, (name, finished)
        assert finished.status != 0, name


# Calls that a program is refused; it says `escaped` when it is not.
REFUSED = {
    "memory": "x = bytearray(600 << 20)\nprint('escaped')",
    "memory_in_small_pieces": (
        "x = []\nwhile len(x) < 600: x.append(bytearray(1 << 20))\nprint('escaped')"
    ),
    "memory_of_several": (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = bytes(250 << 20).replace(b'\\0', b'1'); time.sleep(1); os._exit(0)\n"
        "for _ in range(4):\n"
        "    if os.wait()[1]: os._exit(1)\n"
        "print('escaped')"
    ),
    "shared_memory": (
        "import mmap\nm = mmap.mmap(-1, 900 << 20)\n"
        "for place in range(0, 900 << 20, 4096): m[place] = 1\n"
        "import time; time.sleep(1)\nprint('escaped')"
    ),
    "one_large_file": (
        "f = open('x', 'wb')\nfor _ in range(40): f.write(bytes(1 << 20)); f.flush()\n"
        "print('escaped')"
    ),
    "a_sparse_file": "open('x', 'wb').truncate(1 << 40)\nprint('escaped')",
    "open_files": "f = [open('/dev/null') for _ in range(100)]\nprint('escaped')",
    "core_file": (
        "import os, signal\n"
        "if os.fork() == 0: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "os.wait()\nprint('escaped' if len(os.listdir('.')) > 1 else 'no core')"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_program_gets_no_more_than_its_limit(name: str, backend: str) -> None:
    # A file has a limit of its own.
    limits = {"folder_bytes": 1 << 30} if name == "one_large_file" else {}
    await run(backend, REFUSED[name], **limits)


# 64 processes, each of which goes on in a child of its own ten times a second: as hard to end as a
# bomb without a bound.
BOMB = """
import os, time
first = os.getpid()
rounds = 6
while True:
    try:
        child = os.fork()
    except OSError:
        child = 0
    rounds -= 1
    if rounds < 0:
        if child and os.getpid() != first:
            os._exit(0)
        time.sleep(0.1)
"""


async def test_a_fork_bomb_ends_and_leaves_nothing(backend: str) -> None:
    program = (
        "import os, sys\n"
        f"open('run.py', 'w').write({BOMB!r})\n"
        f"os.execv(sys.executable, [sys.executable, 'run.py', {MARK!r}])"
    )
    finished = await run(backend, program, processes=8, seconds=3)
    assert finished.ended_by in ("processes", "seconds")
    assert not marked(MARK)


async def test_processes_that_nobody_waits_for_do_not_pile_up(backend: str) -> None:
    program = (
        "import os, time\n"
        "for _ in range(3000):\n"
        "    try:\n"
        "        os.fork() or os._exit(0)\n"
        "    except OSError:\n"
        "        time.sleep(0.01)\n"
    )
    finished = await run(backend, program, seconds=30)
    assert finished.ended_by == "processes"


# Forks until the kernel refuses it, and says how many processes there were.
FORKING = """
import os, signal, sys
num_processes = 1
while True:
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        signal.pause()
    num_processes += 1
print(num_processes, flush=True)
"""


async def test_a_bomb_without_a_bound_gets_no_more_processes_than_threads_allow(
    backend: str,
) -> None:
    # Sandlock counts processes itself; with bubblewrap, `processes` would need a keeper's look.
    finished = await run(backend, FORKING, processes=300, threads=40)
    if bounds_threads(backend):
        assert 20 < int(finished.stdout) <= 40 + OWN_THREADS
        assert finished.ended_by == ""
    else:
        assert (
            finished.ended_by in ("threads", "processes") or int(finished.stdout) <= 300
        )


# Three processes, which start threads until they are refused one, or have 60.
THREADS = """
import os, threading, time
threading.stack_size(65536)
gate = threading.Event()
def starts():
    num_threads = 1
    try:
        while num_threads < 60:
            threading.Thread(target=gate.wait, daemon=True).start()
            num_threads += 1
    except RuntimeError:
        pass
    print(num_threads, flush=True)
    time.sleep(2)
    os._exit(0)
children = [os.fork() or starts() for _ in range(2)]
starts()
"""


async def test_threads_of_all_processes_are_bounded_together(backend: str) -> None:
    finished = await run(backend, THREADS, threads=40)
    if bounds_threads(backend):
        assert finished.ended_by == ""
        assert sum(map(int, finished.stdout.split())) <= 40 + OWN_THREADS
    else:
        assert finished.ended_by == "threads"


async def test_a_program_cannot_raise_its_limits(backend: str) -> None:
    program = (
        "import resource\n"
        "for name in ('NPROC', 'NOFILE', 'DATA', 'CPU', 'FSIZE', 'CORE', 'SIGPENDING'):\n"
        "    number = getattr(resource, 'RLIMIT_' + name, 11)\n"
        "    most = resource.getrlimit(number)[1]\n"
        "    if most == resource.RLIM_INFINITY: continue\n"
        "    try: resource.setrlimit(number, (most, most + 1))\n"
        "    except ValueError: continue\n"
        "    print('escaped')\n"
    )
    assert (await run(backend, program)).status == 0


@pytest.mark.skipif(
    not gives_accounts(), reason="only root gives programs other accounts"
)
def test_a_file_that_only_root_can_read_is_refused(tmp_path: Path) -> None:
    if reason := why_not("bubblewrap"):
        pytest.skip(reason)
    tmp_path.joinpath("secret").touch(0o600)
    with pytest.raises(
        ConfigError, match="readable names .*secret, which only root can read"
    ):
        Sandbox(LIMITS, readable=[tmp_path / "secret"], backend="bubblewrap")


async def test_daemons_end_with_the_program(backend: str) -> None:
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        null = os.open('/dev/null', os.O_RDWR)\n"
        "        for number in range(3): os.dup2(null, number)\n"
        f"        os.execv('/bin/sleep', ['sleep', {A_TIME!r}])\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(0.5); print('done')"
    )
    finished = await run(backend, program)
    assert finished.stdout == b"done\n"
    assert not marked(A_TIME)


async def test_a_daemon_that_holds_the_output_ends_with_the_program(
    backend: str,
) -> None:
    program = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(3600)\nprint('done')"
    finished = await run(backend, program)
    assert (finished.stdout, finished.status, finished.ended_by) == (b"done\n", 0, "")


async def sleeping(backend: str) -> asyncio.Task[Finished]:
    """A run whose program sleeps by now; launcher and keeper name the program too."""
    running = asyncio.create_task(
        Sandbox(LIMITS, backend=backend).run(["sleep", A_TIME])
    )
    await until(lambda: marked(A_TIME, name="sleep") or running.done())
    assert not running.done(), running.result()
    return running


async def test_a_cancelled_run_leaves_nothing(backend: str) -> None:
    running = await sleeping(backend)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not marked(A_TIME)


async def test_a_starter_that_was_killed_is_followed_by_another(backend: str) -> None:
    box = Sandbox(LIMITS, backend=backend)
    assert (await box.run("print(1)")).stdout == b"1\n"
    starter = sandbox._STARTER._process
    starter.kill()
    starter.wait()
    assert (await box.run("print(2)")).stdout == b"2\n"
    assert sandbox._STARTER._process is not starter


async def test_programs_end_with_their_starter(backend: str) -> None:
    async with Sandbox(LIMITS, backend=backend).start(["sleep", A_TIME]) as started:
        await until(lambda: marked(A_TIME, name="sleep"))
        sandbox._STARTER.end()
        with pytest.raises(RuntimeError, match="ended from outside"):
            await started.finish()
    assert not marked(A_TIME)


async def test_a_start_that_was_cancelled_leaves_nothing(
    backend: str, monkeypatch
) -> None:
    start = sandbox._STARTER.start
    goes_on = threading.Event()

    def slow(*arguments):
        keeper = start(*arguments)
        assert goes_on.wait(LIMIT_S)
        return keeper

    monkeypatch.setattr(sandbox._STARTER, "start", slow)
    running = await sleeping(backend)
    running.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not marked(A_TIME)


async def test_a_starter_that_stands_still_is_followed_by_another(backend: str) -> None:
    box = Sandbox(LIMITS, backend=backend)
    await box.run("print(1)")
    starter = sandbox._STARTER._process
    sandbox._STARTER._asks.settimeout(0.1)
    starter.send_signal(signal.SIGSTOP)
    assert (await box.run("print(2)")).stdout == b"2\n"
    assert starter.returncode == -signal.SIGKILL


async def test_a_start_without_descriptors_fails_and_ends_no_other_program(
    backend: str,
) -> None:
    box = Sandbox(LIMITS, backend=backend)
    async with box.start("print(input())") as started:
        starter = sandbox._STARTER._process
        before = resource.prlimit(starter.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(starter.pid, resource.RLIMIT_NOFILE, (5, before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            await box.run("print(2)")
        resource.prlimit(starter.pid, resource.RLIMIT_NOFILE, before)
        started.stdin.write(b"3\n")
        assert (await started.finish()).stdout == b"3\n"
    assert (await box.run("print(2)")).stdout == b"2\n"


def test_a_starter_that_cannot_be_forked_leaves_no_descriptor(monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(subprocess, "Popen", fails)
    descriptors = os.pipe()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError, match="no process is left"):
        sandbox._Starter().start(descriptors)
    assert len(os.listdir("/proc/self/fd")) == len(before) - len(descriptors)


def test_a_fork_of_this_process_has_a_starter_of_its_own(backend: str) -> None:
    box = Sandbox(LIMITS, backend=backend)
    asyncio.run(box.run("print(1)"))
    starter = sandbox._STARTER._process
    forked = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(asyncio.run(box.run("raise SystemExit(7)")).status)
    )
    with sandbox._STARTER._lock:
        forked.start()
    try:
        forked.join(LIMIT_S)
        assert forked.exitcode == 7
    finally:
        forked.kill()
    assert asyncio.run(box.run("print(2)")).stdout == b"2\n"
    assert sandbox._STARTER._process is starter


async def test_signals_and_statuses_are_those_of_the_program(backend: str) -> None:
    for number in (signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT):
        finished = await run(backend, f"import os; os.kill(os.getpid(), {int(number)})")
        assert (finished.status, finished.ended_by) == (-number, "")
    assert (await run(backend, "import os; os._exit(3)")).status == 3
    assert (await run(backend, "import os; os.kill(os.getpid(), 9)")).ended_by == "kill"


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the calls of 32-bit programs"
)
async def test_calls_of_other_kinds_of_programs_end_the_program(backend: str) -> None:
    # mov eax, 20; int 0x80; ret: getpid as 32-bit programs call it.
    program = (
        "import ctypes, mmap\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(at)() > 0 and 'escaped')"
    )
    finished = await run(backend, program)
    assert finished.status == -signal.SIGSYS
    x32 = "import ctypes\nprint('escaped' if ctypes.CDLL(None).syscall(0x40000027) > 0 else 'no')"
    await run(backend, x32)


async def test_a_program_that_is_not_there_fails(backend: str) -> None:
    finished = await Sandbox(LIMITS, backend=backend).run(["/missing/program"])
    assert finished.status != 0
    assert b"/missing/program" in finished.stderr


async def test_a_file_outside_of_the_folder_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="inside the folder"):
        await Sandbox(LIMITS, backend=backend).run("", files={"../x": ""})


def test_a_limit_must_be_above_0() -> None:
    for value, rule in ((0, "at least 1"), (-1, "at least 1"), (2.5, "a whole number")):
        with pytest.raises(
            ConfigError, match=f"memory_bytes must be {rule}, got {value}"
        ):
            Sandbox(Limits(memory_bytes=value))
    for value, rule in (
        (0, "above 0"),
        (math.nan, "a finite number"),
        (math.inf, "a finite numb"),
    ):
        with pytest.raises(ConfigError, match=f"seconds must be {rule}.*, got {value}"):
            Sandbox(Limits(seconds=value))


def test_a_machine_without_a_sandbox_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    trial.cache_clear()
    try:
        with pytest.raises(ConfigError) as refused:
            Sandbox()
    finally:
        trial.cache_clear()
    assert str(refused.value) == (
        "there is no sandbox on this machine; sandlock: the package is not installed: "
        "pip install sandlock==0.9.0; bubblewrap: the program bwrap is not installed: "
        "apt install bubblewrap"
    )


def test_a_kernel_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sandlock = pytest.importorskip("sandlock")
    failed = subprocess.CompletedProcess([], 1, b"", b"some error\n")
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 3)
    trial.cache_clear()
    try:
        reason = why_not("sandlock")
        monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 7)
        trial.cache_clear()
        assert why_not("sandlock") == "some error"
    finally:
        trial.cache_clear()
    assert (
        reason == "this kernel has version 3 of Landlock, and 6 is needed (Linux 6.12)"
    )


def test_the_first_sandbox_that_works_and_bounds_threads_is_taken() -> None:
    working = [name for name in BACKENDS if not why_not(name)]
    bounding = [name for name in working if bounds_threads(name)]
    assert first_backend() == (bounding or working)[0]


@pytest.mark.parametrize("with_port", [False, True])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_jumps_of_the_filter_stay_inside(machine: str, with_port: bool) -> None:
    program = filter_program(machine, with_port=with_port)
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    # The kernel's BPF_MAXINSNS.
    assert len(steps) <= 4096
    for index, step in enumerate(steps):
        if step[0] & 7 == 5:
            assert index + 1 + max(step[2], step[3]) < len(steps)
    assert steps[-1][0] == 6
