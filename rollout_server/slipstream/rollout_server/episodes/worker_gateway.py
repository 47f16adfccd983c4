"""Environment workers as processes, the service to which they connect, and their log files.

Consumes: the streams of workers. Produces: call tables of connected workers. Waits for: hellos and
answers. Unblocked by: a worker's message, or the end of its stream.

The server starts a keeper (`slipstream.core.machine.keeper`), which runs the worker as its child.
When the keeper ends, every process that the environment has started ends too, even if the server is
killed. If a keeper is killed, its orphans are reparented to the server, which is a subreaper and
ends them.
"""

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import selectors
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

import grpc
import grpc.aio
from slipstream.core.errors import RunFailed
from slipstream.core.machine.files import OwnedFolder, remove_abandoned
from slipstream.core.machine.other_python import worker_program
from slipstream.core.machine.process import is_reaper, kill_orphans, send_signal
from slipstream.protocol.access.security import SERVER_OPTIONS
from slipstream.protocol.access.tokens import TOKEN_KEY
from slipstream.protocol.call_record import CallRecord
from slipstream.rollout_server.episodes.calls import CallTable
from slipstream.rollout_server.process import worker_environment
from slipstream.v1 import environment_pb2, environment_pb2_grpc

# Seconds that a keeper needs, on a busy machine, to end all processes below it.
_STOP_LIMIT_S = 30.0
_MAX_CAUSE_BYTES = 1000
# Seconds between two checks for the orphans of a killed keeper.
_LOOK_S = 0.02


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker and all processes that it has started; 0 means no limit.

    Starts of a worker that does not attach are repeated for `start_s` seconds.
    """

    memory_bytes: int = 0
    processes: int = 0
    start_s: float = 0.0

    def arguments(self) -> list[str]:
        """Returns the limits as command-line arguments of a keeper."""
        return [
            *("--memory-bytes", str(self.memory_bytes)),
            *("--memory-setting", "rollout_server.environment_memory_gib"),
            *("--processes", str(self.processes)),
            *("--processes-setting", "rollout_server.environment_processes"),
        ]


NO_LIMITS = WorkerLimits()


class WorkerProcess:
    """Owns a keeper process and two memory files: its worker's calls, and why the worker ended.

    `close` ends the process and frees the files.
    """

    # The keepers that this process has started, and how many it is starting.
    _keepers: ClassVar[set[int]] = set()
    _num_starting: ClassVar[int] = 0

    def __init__(self, process: asyncio.subprocess.Process, record: int, cause: int) -> None:
        self._process, self._record, self._cause = process, record, cause

    @classmethod
    async def start(
        cls, command: Sequence[str], *, limits: WorkerLimits, token: str, log: int
    ) -> Self:
        """Starts a keeper that runs `command`, whose output goes to the file descriptor `log`.

        The worker gets the descriptor of its call record by `--record`, and authenticates with
        `token` (see `WorkerGateway.expect`). Raises OSError when no process can be started.
        """
        record = os.memfd_create("calls", os.MFD_CLOEXEC)
        cause = os.memfd_create("cause", os.MFD_CLOEXEC)
        WorkerProcess._num_starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipstream.core.machine.keeper"),
                *("--cause-fd", str(cause), *limits.arguments()),
                *("--", *command, "--record", str(record)),
                env=worker_environment(os.environ, token),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(record, cause),
                start_new_session=True,
            )
        except BaseException:
            os.close(record)
            os.close(cause)
            raise
        finally:
            WorkerProcess._num_starting -= 1
        cls._keepers.add(process.pid)
        return cls(process, record, cause)

    def calls(self) -> CallRecord:
        """Returns the calls that the worker is answering, or was answering when it ended."""
        return CallRecord.read(self._record)

    @property
    def was_killed(self) -> bool:
        return (self._process.returncode or 0) < 0

    async def wait(self) -> str:
        """Waits for the end of the worker; returns the cause in words."""
        code = await self._process.wait()
        said = os.pread(self._cause, _MAX_CAUSE_BYTES, 0).decode(errors="replace").strip()
        if said:
            return f"worker was ended: {said}"
        if code < 0:
            return f"worker was killed by {signal.Signals(-code).name}"
        return f"worker exited with code {code}"

    def end(self) -> None:
        """Asks the keeper to end the worker and all processes below it; does not wait."""
        send_signal(self._process, signal.SIGTERM)

    async def close(self) -> None:
        """Ends the worker, and kills it if it has not ended after `_STOP_LIMIT_S` seconds.

        If a signal ended the worker, this also kills the processes that the worker left behind, for
        at most the same time.
        """
        if self._process.returncode is None:
            self.end()
            try:
                async with asyncio.timeout(_STOP_LIMIT_S):
                    await self._process.wait()
            except TimeoutError:
                send_signal(self._process, signal.SIGKILL)
                await self._process.wait()
        self._keepers.discard(self._process.pid)
        if self.was_killed and is_reaper():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_LIMIT_S):
                    # A keeper that is being started has its own session, and is not known yet.
                    while self._num_starting or kill_orphans(self._keepers):
                        await asyncio.sleep(_LOOK_S)
        os.close(self._record)
        os.close(self._cause)


log = logging.getLogger(__name__)

_MAX_QUEUED_COMMANDS = 65_536
_READ_BYTES = 65536
# Bytes in the longest pipe that Linux grants: as many may be unread when the logs are closed.
_MAX_PIPE_BYTES = 1 << 20
_HEALTH_PERIOD_S = 0.5
# Seconds within which any working disk takes a full pipe of each worker.
_CLOSE_LIMIT_S = 10.0


class BoundedLog:
    """A log in two files of at most `max_bytes` / 2 each: `path`, and `PATH.1` with older lines.

    At least the last `max_bytes` / 2 of the output are thus kept. A file begins with a whole line,
    unless a single line is longer than a file. Existing files are continued.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        # Bytes of the note at the head of the file, which is no output.
        self._note_bytes = 0

    def write(self, output: bytes) -> None:
        """Appends `output`. Raises OSError when the file cannot be written."""
        while output:
            room = max(0, self._max_bytes // 2 - self._size)
            part = output
            if len(output) > room:
                part = output[: output.rfind(b"\n", 0, room) + 1]
                if not part and self._size <= self._note_bytes:
                    part = output[:room]
            if not part:
                self._begin_another()
                continue
            written = self._file.write(part)
            self._size += written
            output = output[written:]

    def close(self) -> None:
        self._file.close()

    def _begin_another(self) -> None:
        before = self.path.with_name(f"{self.path.name}.1")
        self.path.replace(before)
        full, self._file = self._file, self.path.open("ab", buffering=0)
        full.close()
        note = (
            f"slipstream: the lines before these are in {before.name}, older ones were removed: "
            f"{self._max_bytes} bytes are kept\n"
        )
        self._size = 0
        self._size = self._note_bytes = self._file.write(note.encode())


class WorkerLogs:
    """Writes the logs of all workers of a server until `close`.

    A separate thread copies the workers' pipes, so that a worker that prints never waits for the
    server's event loop. A pipe has the output of one worker and of all its child processes.
    """

    def __init__(
        self, folder: Path, max_bytes: int, *, close_limit_s: float = _CLOSE_LIMIT_S
    ) -> None:
        """Starts the thread; each worker's log in `folder` has at most `max_bytes`."""
        self._folder, self._max_bytes, self._close_limit_s = folder, max_bytes, close_limit_s
        self._logs: dict[str, BoundedLog] = {}
        self._new: queue.SimpleQueue[tuple[int, BoundedLog]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._complained: set[BoundedLog] = set()
        self._thread = threading.Thread(target=self._run, name="worker-logs", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def output(self, name: str) -> Iterator[int]:
        """Yields the writing end of a pipe for a process that the block starts.

        The pipe's content is appended to the log called `name`.
        """
        if name not in self._logs:
            self._logs[name] = BoundedLog(self._folder / name, self._max_bytes)
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._new.put((read, self._logs[name]))
        os.write(self._wake_write, b"+")
        try:
            yield write
        finally:
            os.close(write)

    async def watch(self) -> None:
        """Waits, and raises RunFailed when the thread has ended: full pipes would block workers."""
        while self._thread.is_alive():
            await asyncio.sleep(_HEALTH_PERIOD_S)
        raise RunFailed("the output of environment workers is not logged any more: see above")

    def close(self) -> None:
        """Writes all output printed so far and ends the thread; call it after the workers' end.

        Returns after `close_limit_s` at the latest, even if the disk does not answer.
        """
        os.close(self._wake_write)
        self._thread.join(self._close_limit_s)
        if self._thread.is_alive():
            log.warning(
                "%s: what environment workers printed last was not written within %g s",
                self._folder,
                self._close_limit_s,
            )

    def _run(self) -> None:
        try:
            self._copy_all()
        finally:
            for each in list(self._logs.values()):
                each.close()

    def _copy_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            is_open = True
            while is_open:
                for key, _ in selector.select():
                    if key.fd == self._wake_read:
                        is_open = bool(os.read(key.fd, 1))
                        while not self._new.empty():
                            pipe, own = self._new.get()
                            selector.register(pipe, selectors.EVENT_READ, own)
                    elif self._copy(key.fd, key.data) == 0:
                        selector.unregister(key.fd)
                        os.close(key.fd)
            for key in list(selector.get_map().values()):
                self._close_pipe(key.fd, key.data)

    def _close_pipe(self, pipe: int, own: BoundedLog | None) -> None:
        """Copies what a pipe holds now to the log `own`, if there is one, and closes the pipe.

        It does not wait for the pipe's end: a process that outlived its worker could print forever.
        """
        left = _MAX_PIPE_BYTES if own is not None else 0
        with contextlib.suppress(BlockingIOError):
            while left > 0 and own is not None and (copied := self._copy(pipe, own)):
                left -= copied
        os.close(pipe)

    def _copy(self, pipe: int, own: BoundedLog) -> int:
        """Copies a piece of output; returns the number of bytes read, 0 at the end of the pipe."""
        output = os.read(pipe, _READ_BYTES)
        try:
            own.write(output)
        except OSError as error:
            # The worker must not wait for a disk that is full.
            if own not in self._complained:
                self._complained.add(own)
                log.warning("%s: %s; what is printed is lost", own.path, error.strerror)
        return len(output)


class WorkerStream:
    """The stream of one worker process, from the moment the server expects it until its end."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        # The calls to the worker once it has attached, or why it never will.
        self.table: asyncio.Future[CallTable] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


class WorkerGateway(environment_pb2_grpc.WorkerServiceServicer):
    """The service to which workers connect with tokens, by a unix socket in a private folder."""

    def __init__(
        self,
        log_dir: Path,
        *,
        server: str = "rollout-server",
        program: Callable[[str], Sequence[str]] = worker_program,
        log_bytes: int,
        limits: WorkerLimits = NO_LIMITS,
        takes_tools: bool = True,
    ) -> None:
        """`server` is the id of this server; `program` returns the command of a worker.

        `log_bytes` limits the log of one worker, `limits` hold for each worker. `takes_tools` says
        that environments may offer tools to the model.
        """
        self.limits, self.takes_tools = limits, takes_tools
        self.log_dir, self.server = log_dir, server
        self.program, self._log_bytes = program, log_bytes
        self.logs: WorkerLogs
        self._folder: OwnedFolder
        # Streams of workers that have not attached yet, by token.
        self._expected: dict[str, WorkerStream] = {}

    @property
    def address(self) -> str:
        return f"unix:{self._folder.path / 'workers.sock'}"

    async def __aenter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = WorkerLogs(self.log_dir, self._log_bytes)
        await asyncio.to_thread(remove_abandoned)
        self._folder = OwnedFolder("sockets")
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        environment_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)
        await asyncio.to_thread(self.logs.close)
        self._folder.close()

    def expect(self, stream: WorkerStream) -> None:
        """Lets one worker connect with the token of `stream`."""
        self._expected[stream.token] = stream

    def forget(self, stream: WorkerStream) -> None:
        """Revokes the token of a worker that has ended."""
        self._expected.pop(stream.token, None)

    async def Attach(  # noqa: N802 - the name of the service's method
        self,
        requests: AsyncIterator[environment_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[
            environment_pb2.WorkerMessage, environment_pb2.WorkerCommand
        ],
    ) -> None:
        """Serves one worker, from its hello to its end."""
        shown = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        stream = self._expected.pop(str(shown).removeprefix("Bearer "), None)
        if stream is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown worker")
        hello = await anext(requests)
        if hello.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is a hello")
        commands: asyncio.Queue[environment_pb2.WorkerCommand] = asyncio.Queue(_MAX_QUEUED_COMMANDS)

        async def write() -> None:
            # A worker that is gone takes no command: its requests end too, and with them this call.
            with contextlib.suppress(grpc.aio.InternalError):
                while True:
                    await context.write(await commands.get())

        async with asyncio.TaskGroup() as group:
            writer = group.create_task(write())
            table = CallTable(commands.put_nowait)
            if not stream.table.done():
                stream.table.set_result(table)
            try:
                async for message in requests:
                    table.answered(message)
            finally:
                stream.over.set()
                writer.cancel()
