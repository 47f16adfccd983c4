"""Programs that try to get out of each sandbox, one way a test, and that would without one."""

import contextlib
import ctypes
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slipstream.environments.sandbox import Sandbox
from slipstream.environments.sandbox.kept_program import ProgramEnd, run_program
from slipstream.environments.sandbox.plan import Limits, Plan
from slipstream.environments.sandbox.sandbox import launched, why_not
from support.fakes.escapes import (
    BEGINNING,
    MAY_FAIL_OUTSIDE,
    NETWORK,
    RARE_NETWORK,
    WORK_OUTSIDE,
)
from support.rigs.completed import completed

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux"),
]

SECRET = "a secret of the worker"
# Not those of another run on this machine.
SHM_KEY = 0x51 << 24 | os.getpid()
SHARED = Path(f"/dev/shm/slipstream-escape-{os.getpid()}")
NUMBERS = {
    "x86_64": {
        "bpf": 321,
        "perf": 298,
        "keyctl": 250,
        "open_by_handle_at": 304,
        "reboot": 169,
        "init_module": 175,
        "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297,
        "sched_getattr": 315,
        "ioprio_get": 252,
        "get_robust_list": 274,
        "io_setup": 206,
        "name_to_handle_at": 303,
        "kcmp": 312,
        "clone": 56,
        "userfaultfd": 323,
        "seccomp": 317,
    },
    "aarch64": {
        "bpf": 280,
        "perf": 241,
        "keyctl": 219,
        "open_by_handle_at": 265,
        "reboot": 142,
        "init_module": 105,
        "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240,
        "sched_getattr": 275,
        "ioprio_get": 31,
        "get_robust_list": 100,
        "io_setup": 0,
        "name_to_handle_at": 264,
        "kcmp": 272,
        "clone": 220,
        "userfaultfd": 282,
        "seccomp": 277,
    },
}
VICTIM = """
import ctypes, os, signal, sys, time
signal.signal(signal.SIGWINCH, lambda *_: os._exit(9))
held = ctypes.create_string_buffer(b"private")
print(ctypes.addressof(held), flush=True)
time.sleep(3600)
"""


class Outside:
    """What a program must not reach: files, a process, sockets, shared memory."""

    def __init__(self, folder: Path) -> None:
        self._home = folder / "home"
        self._home.mkdir()
        self._secret = self._home / "secret"
        self._secret.write_text(SECRET)
        self._secret.chmod(0o600)
        with contextlib.suppress(OSError):
            os.setxattr(self._secret, "user.known", SECRET.encode())
        readable = folder / "readable"
        readable.write_text("text")
        self._victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.defpath, "PRIVATE": SECRET},
        )
        address = int(self._victim.stdout.readline())
        self._streams = [socket.create_server(("127.0.0.1", 0))]
        self._datagrams = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        self._datagrams[0].bind(("127.0.0.1", 0))
        abstract = f"slipstream-{os.getpid()}-{os.urandom(4).hex()}"
        for name in ("\0" + abstract, str(self._home / "s")):
            self._streams.append(self._bound(socket.SOCK_STREAM, name))
            self._streams[-1].listen()
        for name in ("\0" + abstract + "-datagram", str(self._home / "d")):
            self._datagrams.append(self._bound(socket.SOCK_DGRAM, name))
        self.given = {
            "home": str(self._home),
            "secret": str(self._secret),
            "readable": str(readable),
            # A file of this user that programs may read, and that nobody holds open.
            "library": str(Path(os.__file__).with_name("this.py")),
            "victim": self._victim.pid,
            "address": address,
            "tcp": self._streams[0].getsockname()[1],
            "udp": self._datagrams[0].getsockname()[1],
            "unix": str(self._home / "s"),
            "unix_datagram": str(self._home / "d"),
            "abstract": abstract,
            "shared": str(SHARED),
            "shm_key": SHM_KEY,
            **NUMBERS[platform.machine()],
        }
        self._before = self._facts()

    def reached(self) -> dict[str, object]:
        """What is not as it was, by name."""
        now = self._facts()
        return {name: now[name] for name in now if now[name] != self._before[name]}

    def close(self) -> None:
        self._victim.kill()
        self._victim.wait()
        self._victim.stdout.close()
        for listener in (*self._streams, *self._datagrams):
            listener.close()
        SHARED.unlink(missing_ok=True)

    def _bound(self, kind: int, name: str) -> socket.socket:
        server_socket = socket.socket(socket.AF_UNIX, kind)
        server_socket.bind(name)
        return server_socket

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"home": sorted(os.listdir(self._home))}
        if self._secret.exists():
            seen = self._secret.stat()
            facts["secret"] = (self._secret.read_text(), seen.st_mode, seen.st_mtime_ns)
            facts["links"] = seen.st_nlink
            facts["marks"] = os.listxattr(self._secret)
        victim = psutil.Process(self._victim.pid)
        facts["victim"] = self._victim.poll()
        if facts["victim"] is None:
            facts["limit"] = victim.rlimit(psutil.RLIMIT_CPU)
            facts["cores"] = victim.cpu_affinity()
            facts["priority"] = victim.nice()
            facts["stopped"] = victim.status() == psutil.STATUS_STOPPED
        facts["connections"] = [self._is_called(stream) for stream in self._streams]
        facts["messages"] = [
            self._is_written_to(datagram) for datagram in self._datagrams
        ]
        facts["shared memory"] = SHARED.exists()
        facts["segments"] = self._take_segment()
        return facts

    def _is_called(self, listening: socket.socket) -> bool:
        listening.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listening.accept()[0].close()
            return True
        return False

    def _is_written_to(self, waiting: socket.socket) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(waiting.recv(100, socket.MSG_DONTWAIT))
        return False

    def _take_segment(self) -> bool:
        libc = ctypes.CDLL(None)
        number = libc.shmget(SHM_KEY, 0, 0)
        if number >= 0:
            libc.shmctl(number, 0, None)
        return number >= 0


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.setenv("SLIPSTREAM_ESCAPE", SECRET)
    outside = Outside(tmp_path)
    yield outside
    outside.close()


@pytest.mark.parametrize("name", WORK_OUTSIDE | MAY_FAIL_OUTSIDE)
async def test_a_program_does_not_get_out(
    name: str, backend: str, outside: Outside
) -> None:
    program = BEGINNING + (WORK_OUTSIDE | MAY_FAIL_OUTSIDE)[name]
    files = {"given.json": json.dumps(outside.given)}
    sandbox = Sandbox(backend=backend, readable=[outside.given["readable"]])
    finished = await sandbox.run(program, files=files)
    assert b"escaped" not in finished.stdout, finished
    assert outside.reached() == {}
    # The program went to its end: it did try.
    assert (finished.status, finished.stderr, finished.ended_by) == (0, b"", "")


async def ended_with_a_port(
    program: str, folder: Path, outside: Outside, port: int
) -> ProgramEnd:
    """Runs a program as `Command` does in its sandbox, with one port that it may connect to."""
    if reason := why_not("sandlock"):
        pytest.skip(reason)
    work = folder / "work"
    work.mkdir()
    (work / "given.json").write_text(json.dumps(outside.given))
    readable = [outside.given["readable"]]
    plan = Plan("sandlock", str(work), readable, Limits(), cause_fd=1, port=port)
    command = launched(plan, [sys.executable, "-I", "-c", BEGINNING + program])
    return await run_program(
        command, folder=work, variables={}, limits=Limits(seconds=60)
    )


@pytest.mark.parametrize("name", NETWORK | RARE_NETWORK)
async def test_a_program_with_a_port_gets_no_further(
    name: str, tmp_path: Path, outside: Outside
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as allowed:
        port = allowed.getsockname()[1]
        program = (NETWORK | RARE_NETWORK)[name]
        end = await ended_with_a_port(program, tmp_path, outside, port)
    assert outside.reached() == {}
    assert (end.status, end.output) == (0, "")


async def test_a_program_with_a_port_reaches_that_port(
    tmp_path: Path, outside: Outside
) -> None:
    program = NETWORK["connect_by_tcp"]
    end = await ended_with_a_port(program, tmp_path, outside, outside.given["tcp"])
    assert (end.status, end.output) == (0, "escaped\n")


@pytest.mark.parametrize("name", WORK_OUTSIDE)
def test_it_would_without_a_sandbox(
    name: str, tmp_path: Path, outside: Outside
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "given.json").write_text(json.dumps(outside.given))
    done = completed(
        [sys.executable, "-I", "-c", BEGINNING + WORK_OUTSIDE[name]], cwd=folder
    )
    assert "escaped" in done.stdout or outside.reached(), done
