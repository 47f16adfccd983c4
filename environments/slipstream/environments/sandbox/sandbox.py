"""Runs untrusted programs, such as code that a model has written, with limits.

A run waits for the end of the program, an exceeded limit, or a cancellation. None of these leaves a
process or a file behind.
"""

import asyncio
import atexit
import contextlib
import errno
import functools
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from pydantic import Field
from slipstream.client.terminal import complain
from slipstream.core.arguments import AboveZero, checked, kind_of, of_kind
from slipstream.core.errors import ConfigError
from slipstream.core.machine.files import OwnedFolder
from slipstream.environments.sandbox.kept_program import own_program
from slipstream.environments.sandbox.plan import Backend, Limits, Plan
from slipstream.environments.sandbox.starter import described
from slipstream.environments.sandbox.system_calls import machine_is_known
from slipstream.environments.sandbox.thread_limit import gives_accounts, private_path

BACKENDS: tuple[Backend, ...] = ("sandlock", "bubblewrap")
LAUNCHER = "slipstream.environments.sandbox.launcher"
_CHUNK_BYTES = 64 << 10
# The longest line that `StartedProgram.stdout` gives.
LINE_BYTES = 4 << 20
# Seconds beyond the program's own for starting and ending it on a busy machine.
_SLACK_S = 60.0
_PROBE_LIMIT_S = 60.0
_PROBE_THREADS = 8
# Starts threads up to a number, and says whether one was refused.
_PROBE = """
import sys, _thread
ends = _thread.allocate_lock()
ends.acquire()
try:
    for _ in range(int(sys.argv[1])):
        _thread.start_new_thread(ends.acquire, ())
    print("started", flush=True)
except RuntimeError:
    print("refused", flush=True)
import os
os._exit(0)
"""
# Signals with which the kernel and sandlock end a program at a limit, without naming the limit.
_SIGNALS_OF_LIMITS = {-signal.SIGXCPU: "processor_s", -signal.SIGKILL: "kill"}


@dataclass(frozen=True)
class Finished:
    """The end of a program: its exit status, -N for signal N, and its output.

    `ended_by` is the name of the limit that ended the program, or "" if none did. It is "kill"
    after a SIGKILL of unknown origin, such as sandlock's for a program that asks for too much
    memory.
    """

    status: int
    stdout: bytes
    stderr: bytes
    ended_by: str = ""


class Sandbox:
    """Runs programs without network, variables or files of this process.

        finished = await Sandbox(Limits(seconds=5)).run("print(6 * 7)")
        assert int(finished.stdout) == 42

    A program has a folder of its own, which is its working directory and is removed afterwards. It
    can also read the programs and libraries of the system and of this Python, and the paths
    `readable`.
    """

    @checked
    def __init__(
        self,
        limits: Limits | None = None,
        *,
        readable: Sequence[str | Path] = (),
        backend: Backend | None = None,
    ) -> None:
        """Uses `backend`, or the first of `BACKENDS` that works here.

        `limits` None means the defaults of `Limits`. `readable` are further paths that programs may
        read. Raises ConfigError if a limit is not above 0, or the backend does not work.
        """
        kinds = {float: kind_of(AboveZero), int: kind_of(Annotated[int, Field(ge=1)])}
        stated_limits = asdict(limits or Limits())
        types = {name: kinds[type(value)] for name, value in asdict(Limits()).items()}
        self.limits = Limits(
            **{name: of_kind(name, stated_limits[name], types[name]) for name in types}
        )
        self._readable = [os.path.abspath(path) for path in readable]
        self.backend: Backend = backend or first_backend()
        if backend is not None and (reason := why_not(backend)):
            raise ConfigError(f"the sandbox {backend} does not work here: {reason}")
        private = ""
        if gives_accounts():
            # bubblewrap shows a program paths below folders that it could not enter.
            private = private_path(self._readable, with_parents=self.backend == "sandlock")
        if private and self.backend == "bubblewrap":
            raise ConfigError(
                f"readable names {private}, which only root can read: programs that root starts "
                "have an account of their own; let all accounts read it"
            )
        if private or not bounds_threads(self.backend):
            _warn_of_threads(self.backend, private)

    @checked
    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: bytes = b"",
    ) -> Finished:
        """Runs `program`, a command or the text of a Python program, and returns how it ended.

        `files` are written into the program's folder first, by relative path. Raises ValueError for
        a path outside the folder.
        """
        async with self.start(program, files=files) as started:
            started.stdin.write(stdin)
            # The pipe is closed when the program has read all of it, or has ended.
            started.stdin.close()
            return await started.finish()

    @checked
    @asynccontextmanager
    async def start(
        self, program: str | Sequence[str], *, files: Mapping[str, str | bytes] | None = None
    ) -> "AsyncIterator[StartedProgram]":
        """Starts a program and yields it; after the block, ends it and removes its folder.

        The arguments are as in `run`.
        """
        owned = OwnedFolder("sandbox")
        folder = str(owned.path)
        try:
            contents = dict(files or {})
            if isinstance(program, str):
                contents["__main__.py"] = program
                program = [sys.executable, "-I", "__main__.py"]
            paths = {name: Path(name) for name in contents}
            for name, path in paths.items():
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"files are inside the folder of the sandbox, got {name!r}")

            def write() -> None:
                for name, content in contents.items():
                    path = owned.path / paths[name]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.encode() if isinstance(content, str) else content)

            await asyncio.to_thread(write)
            starting = asyncio.create_task(self._start(program, folder))
            try:
                yield await asyncio.shield(starting)
            finally:
                # A program that a cancellation has left behind is started, and then ended.
                await asyncio.shield(_end(starting))
        finally:
            await asyncio.shield(asyncio.to_thread(owned.close))

    async def _start(self, command: Sequence[str], folder: str) -> "StartedProgram":
        plan = Plan(
            self.backend,
            folder,
            self._readable,
            self.limits,
            cause_fd=0,
            may_change_account=True,
        )
        pipes = [os.pipe() for _ in range(4)]
        theirs = [described(command, plan, _variables(folder))]
        theirs += [pipe[place] for pipe, place in zip(pipes, (0, 1, 1, 1), strict=True)]
        ours = [pipe[1 - place] for pipe, place in zip(pipes, (0, 1, 1, 1), strict=True)]
        try:
            keeper = await asyncio.to_thread(_STARTER.start, theirs)
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        started = StartedProgram(keeper, self.limits)
        await started._open(*ours)
        return started


class _Starter:
    """The process that starts programs for this one, and is started again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, program: Sequence[int]) -> int:
        """Starts the program of five descriptors, and closes these; returns that of its keeper.

        Raises OSError if this process or the starter lacks processes or descriptors.
        """
        try:
            with self._lock:
                for _ in range(2):
                    if self._process is None:
                        self._begin()
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        socket.send_fds(self._asks, [b"."], program)
                        answer, keepers, *_ = socket.recv_fds(self._asks, 16, 1)
                        if keepers:
                            os.set_inheritable(keepers[0], False)
                            return keepers[0]
                        if answer:
                            # A descriptor that finds no place here is lost.
                            number = int(answer) or errno.EMFILE
                            raise OSError(number, f"sandbox: {os.strerror(number)}")
                    self.end()
        finally:
            for descriptor in program:
                os.close(descriptor)
        raise RuntimeError("the process that starts sandboxes has ended twice")

    def _begin(self) -> None:
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asks.settimeout(_SLACK_S)
        with theirs, contextlib.ExitStack() as at_failure:
            at_failure.callback(self._asks.close)
            self._process = subprocess.Popen(
                [*own_program("slipstream.environments.sandbox.starter"), str(theirs.fileno())],
                env={"LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            at_failure.pop_all()
        atexit.register(self.end)

    def end(self) -> None:
        """Ends the process, and so all programs that still run."""
        atexit.unregister(self.end)
        process = self._process
        self._process = None
        if process is not None:
            self._asks.close()
            process.kill()
            process.wait()

    def leave(self) -> None:
        """Leaves the process to the parent of this one, which has just forked."""
        self._lock = threading.Lock()
        if self._process is not None:
            # Only its parent can end it and wait for it: here it counts as ended.
            self._process.returncode = 0
        self.end()


_STARTER = _Starter()
os.register_at_fork(after_in_child=_STARTER.leave)


class StartedProgram:
    """A program in a sandbox: `stdin` and `stdout` are its pipes, `finish` waits for its end."""

    def __init__(self, keeper: int, limits: Limits) -> None:
        """Takes a descriptor of the keeper; `_open` makes the pipes."""
        self._keeper = keeper
        self._limits = limits
        self._transports: list[asyncio.BaseTransport] = []
        self._said = ""

    async def _open(self, stdin: int, *outputs: int) -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(stdin, "wb", 0)
        )
        self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        self._transports.append(transport)
        self.stdout, errors, cause = [await self._reader(output) for output in outputs]
        self._errors = bytearray()
        max_bytes = self._limits.output_bytes
        self._reading = asyncio.create_task(_read(errors, self._errors, max_bytes))
        # Launcher and keeper write to it why they ended the program; it ends with them.
        self._ended = asyncio.create_task(cause.read())

    async def _reader(self, descriptor: int) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        self._transports.append(transport)
        return reader

    async def finish(self) -> Finished:
        """Waits for the program's end and returns it; ends a program that exceeds a limit.

        The result's `stdout` lacks output that the caller has already read from the pipe. Raises
        RuntimeError if the sandbox itself was ended from outside.
        """
        output = bytearray()
        ended_by = ""
        max_bytes = self._limits.output_bytes
        reading = asyncio.create_task(_read(self.stdout, output, max_bytes))
        pending = {reading, self._reading}
        try:
            async with asyncio.timeout(self._limits.seconds + _SLACK_S):
                while pending and not ended_by:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    if any(task.result() for task in done if not task.cancelled()):
                        ended_by = "output_bytes"
                if not ended_by:
                    await asyncio.wait([self._ended])
        except TimeoutError:
            ended_by = "seconds"
        finally:
            reading.cancel()
            await asyncio.shield(self.end())
        cause, _, status_text = self._said.partition("ended ")
        if cause.strip() and not ended_by:
            limit_names = [field.name for field in fields(Limits) if field.name in cause.split()]
            ended_by = limit_names[0] if limit_names else "memory_bytes"
        # A keeper that was killed says nothing.
        if not (status_text or ended_by):
            raise RuntimeError("a program's sandbox failed or was ended from outside")
        status = os.waitstatus_to_exitcode(int(status_text or signal.SIGKILL))
        ended_by = ended_by or _SIGNALS_OF_LIMITS.get(status, "")
        return Finished(status, bytes(output), bytes(self._errors), ended_by)

    async def end(self) -> None:
        """Ends the program and all processes that it has started; a second call does nothing."""
        if self._keeper < 0:
            return
        keeper = self._keeper
        self._keeper = -1
        self._reading.cancel()
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(keeper, number)
                if (await asyncio.wait([self._ended], timeout=_SLACK_S))[0]:
                    self._said = self._ended.result().decode()
                    break
        finally:
            os.close(keeper)
            for transport in self._transports:
                transport.close()


async def _read(stream: asyncio.StreamReader, received: bytearray, max_bytes: int) -> bool:
    """Reads a pipe of a program into `received`; True says that it had more than `max_bytes`."""
    while chunk := await stream.read(_CHUNK_BYTES):
        received += chunk
        if len(received) > max_bytes:
            del received[max_bytes:]
            return True
    return False


def first_backend() -> Backend:
    """Returns the first of `BACKENDS` that works here, if possible one that bounds threads.

    Raises ConfigError, with the reason for each, if none works.
    """
    reasons = {backend: why_not(backend) for backend in BACKENDS}
    working = [backend for backend in BACKENDS if not reasons[backend]]
    if not working:
        problems = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        raise ConfigError(f"there is no sandbox on this machine; {problems}")
    return next(filter(bounds_threads, working), working[0])


def why_not(backend: Backend) -> str:
    """Returns in one line why a backend fails here, or "" if it works; blocks as `trial`."""
    return trial(backend).reason


def bounds_threads(backend: Backend) -> bool:
    """Whether the kernel itself bounds the threads of a program here; blocks as `trial`."""
    return trial(backend).bounds_threads


@functools.cache
def _warn_of_threads(backend: Backend, private: str) -> None:
    why = f", since only root can read {private}" if private else ""
    complain(
        f"with {backend} here, threads of programs are only counted five times a second{why}: "
        "between two looks a program can take the machine's; docs/guides/sandbox.md"
    )


@dataclass(frozen=True)
class Trial:
    """The trial of a backend; `reason` is why no program ran in it, or ""."""

    reason: str
    bounds_threads: bool = False


@functools.cache
def trial(backend: Backend) -> Trial:
    """Runs a program in a backend; the first call for a backend blocks until it has ended."""
    if reason := _missing(backend):
        return Trial(reason)
    limits = Limits(threads=_PROBE_THREADS)
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(2 * _PROBE_THREADS)]
    with contextlib.closing(OwnedFolder("sandbox")) as owned:
        folder = str(owned.path)
        plan = Plan(backend, folder, [], limits, cause_fd=2, may_change_account=True)
        try:
            probe = subprocess.run(
                launched(plan, command),
                env=_variables(folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Trial(f"a program in it did not end within {_PROBE_LIMIT_S:g} s")
    if probe.returncode == 0:
        return Trial("", bounds_threads=probe.stdout.strip() == b"refused")
    if backend == "sandlock":
        import sandlock

        version = sandlock.landlock_abi_version()
        needed = sandlock.min_landlock_abi()
        if version < needed:
            what = f"this kernel has version {version} of Landlock"
            return Trial(f"{what}, and {needed} is needed (Linux 6.12)")
    words = probe.stderr.decode(errors="replace").strip().splitlines()
    return Trial(words[-1] if words else f"exit {probe.returncode}")


def _missing(backend: Backend) -> str:
    """Returns what this machine or installation lacks for a backend, or ""."""
    if not machine_is_known():
        machine = f"{platform.system()} on {platform.machine()}"
        return f"it needs Linux on x86_64 or aarch64, this is {machine}"
    if backend == "sandlock" and importlib.util.find_spec("sandlock") is None:
        return "the package is not installed: pip install sandlock==0.9.0"
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed: apt install bubblewrap"
    return ""


def launched(plan: Plan, command: Sequence[str]) -> list[str]:
    """Returns a command that runs `command` in a sandbox; the caller must run it below a keeper."""
    return [*own_program(LAUNCHER), plan.text(), *command]


def _variables(folder: str) -> dict[str, str]:
    path = os.pathsep.join((os.path.dirname(sys.executable), os.defpath))
    return {"PATH": path, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}


async def _end(starting: asyncio.Task[StartedProgram]) -> None:
    await (await starting).end()
