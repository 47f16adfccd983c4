"""Environment workers as processes, the service to which they connect, and their log files.

Consumes: the streams of workers. Produces: call tables of connected workers. Waits for: hellos and
answers. Unblocked by: a worker's message, or the end of its stream.

The server starts a keeper (`slipstream.core.machine.keeper`), which runs the worker as its child. A
worker that follows others is forked by a process that has imported what it needs (`warm_start`).

When the keeper ends, every process that the environment has started ends too, even if the server is
killed. If a keeper is killed, its orphans are reparented to the server, which is a subreaper and
ends them.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

import grpc
import grpc.aio
from slipstream.core.machine.files import OwnedFolder, remove_abandoned
from slipstream.core.machine.keeper import Bounds
from slipstream.core.machine.other_python import worker_program
from slipstream.core.machine.process import is_reaper, kill_orphans, open_variables, send_signal
from slipstream.core.machine.warm_start import ENDED, ForkedKeeper, WarmParent, WarmStart
from slipstream.core.waits import within
from slipstream.protocol.access.security import SERVER_OPTIONS
from slipstream.protocol.access.tokens import TOKEN_KEY
from slipstream.protocol.running_calls import RunningCalls
from slipstream.rollout_server.episodes.calls import CallTable
from slipstream.v1 import environment_pb2, environment_pb2_grpc

# Seconds that a keeper needs, on a busy machine, to end all processes below it.
_STOP_LIMIT_S = 30.0
_MAX_CAUSE_BYTES = 1000
# Seconds between two checks for the orphans of a killed keeper.
_LOOK_S = 0.02
# An environment may fork: gRPC's handlers would then wait for its threads, some of which wait for
# the fork.
_NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "false"}


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker and all processes that it has started; 0 means no limit.

    A worker has `start_s` seconds to attach. At least `lone_workers` that run a single episode may
    exist beside the others.
    """

    memory_bytes: int = 0
    processes: int = 0
    start_s: float = 60.0
    lone_workers: int = 1

    @property
    def bounds(self) -> Bounds:
        """The limits that a keeper holds a worker to, with the names of their settings."""
        return Bounds(
            memory_bytes=self.memory_bytes,
            memory_setting="rollout_server.environment_memory_gib",
            processes=self.processes,
            processes_setting="rollout_server.environment_processes",
        )


NO_LIMITS = WorkerLimits()


def _variables() -> dict[str, str]:
    return open_variables(os.environ) | _NO_FORK_HANDLERS


class WorkerProcess:
    """Owns a keeper process and two memory files: its worker's calls, and why the worker ended.

    `close` ends the process and frees the files.
    """

    # The keepers that this process has started, and how many it is starting.
    _keepers: ClassVar[set[int]] = set()
    _num_starting: ClassVar[int] = 0

    def __init__(
        self, process: asyncio.subprocess.Process | ForkedKeeper, record: int, cause: int
    ) -> None:
        self._process = process
        self._record = record
        self._cause = cause

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        limits: WorkerLimits,
        token: str,
        log: int,
        variables: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts a keeper that runs `command`, whose output goes to the file descriptor `log`.

        The worker gets the descriptor of its call record by `--record`, and authenticates with
        `token` (see `WorkerGateway.expect`). `variables` are further ones for it.
        Raises OSError when no process can be started.
        """
        bounds = limits.bounds
        record = os.memfd_create("calls", os.MFD_CLOEXEC)
        cause = os.memfd_create("cause", os.MFD_CLOEXEC)
        WorkerProcess._num_starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "slipstream.core.machine.keeper",
                "--cause-fd",
                str(cause),
                "--memory-bytes",
                str(bounds.memory_bytes),
                "--memory-setting",
                bounds.memory_setting,
                "--processes",
                str(bounds.processes),
                "--processes-setting",
                bounds.processes_setting,
                "--",
                *command,
                "--record",
                str(record),
                env={
                    **_variables(),
                    **(variables or {}),
                    "SLIPSTREAM_TOKEN": token,
                },
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

    @classmethod
    async def fork(cls, parent: WarmParent, worker: WarmStart, *, log: int) -> Self:
        """Lets `parent` start a worker, whose output goes to the file descriptor `log`.

        Raises OSError when no process can be started, and NoWarmParent.
        """
        record = os.memfd_create("calls", os.MFD_CLOEXEC)
        cause = os.memfd_create("cause", os.MFD_CLOEXEC)
        try:
            process = await parent.start(worker, log=log, record=record, last_words=cause)
        except BaseException:
            os.close(record)
            os.close(cause)
            raise
        return cls(process, record, cause)

    def calls(self) -> RunningCalls:
        """Returns the calls that the worker is answering, or was answering when it ended."""
        return RunningCalls.read(self._record)

    @property
    def was_killed(self) -> bool:
        return (self._process.returncode or 0) < 0

    async def wait(self) -> str:
        """Waits for the end of the worker; returns the cause in words."""
        code = await self._process.wait()
        last_words = os.pread(self._cause, _MAX_CAUSE_BYTES, 0).decode(errors="replace")
        if isinstance(self._process, ForkedKeeper):
            last_words = last_words.rpartition(ENDED)[0]
        if cause := last_words.strip():
            return f"worker was ended: {cause}"
        if code < 0:
            return f"worker was killed by {signal.Signals(-code).name}"
        return f"worker exited with code {code}"

    def end(self) -> None:
        """Asks the keeper to end the worker and all processes below it; does not wait."""
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if isinstance(self._process, ForkedKeeper):
            self._process.tell(number)
        else:
            send_signal(self._process, number)

    async def close(self) -> None:
        """Ends the worker, and kills it if it has not ended after `_STOP_LIMIT_S` seconds.

        If a signal ended the worker, this also kills the processes that the worker left behind, for
        at most the same time. A cancellation is raised when all of it is done: an environment that
        is unloaded cancels workers that an episode's end has cancelled before.
        """
        ending = asyncio.ensure_future(self._end())
        cancelled = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                cancelled = error
        ending.result()
        if cancelled is not None:
            raise cancelled

    async def _end(self) -> None:
        if self._process.returncode is None:
            self.end()
            if not await within(_STOP_LIMIT_S, self._process.wait()):
                self._send(signal.SIGKILL)
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
# Seconds between two checks of the logs' sizes.
_TRIM_PERIOD_S = 0.2


class WorkerLogs:
    """The logs of a server's workers: files to which the workers and their children append."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`trim` shortens each log in `folder` that has more than `max_bytes`."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._paths: set[Path] = set()
        # Those that could not be trimmed, which the server's log tells once.
        self._told: set[Path] = set()

    def output(self, name: str) -> BinaryIO:
        """Opens the log called `name` as the output of a process; the caller closes it."""
        path = self.folder / name
        self._paths.add(path)
        return path.open("ab", buffering=0)

    async def watch(self) -> None:
        """Trims the logs again and again, until this call is cancelled."""
        while True:
            await asyncio.sleep(_TRIM_PERIOD_S)
            await asyncio.to_thread(self.trim)

    def trim(self) -> None:
        """Leaves the last `max_bytes` / 2 of each longer log, from the beginning of a line on."""
        kept = self._max_bytes // 2
        for path in list(self._paths):
            try:
                size = path.stat().st_size
                if size <= self._max_bytes:
                    continue
                with path.open("a+b", buffering=0) as file:
                    last = os.pread(file.fileno(), kept, size - kept)
                    lines = last.partition(b"\n")[2] or last
                    # Workers append too: what they print meanwhile comes before these lines.
                    file.truncate(0)
                    file.write(b"slipstream: older lines were removed\n" + lines)
            except OSError as error:
                if path not in self._told:
                    log.warning("%s is not trimmed: %s", path, error.strerror)
                self._told.add(path)


class WorkerStream:
    """The stream of one worker process, from the moment the server expects it until its end."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.commands: asyncio.Queue[environment_pb2.WorkerCommand] = asyncio.Queue(
            _MAX_QUEUED_COMMANDS
        )
        # The calls to the worker; they may begin when it has attached.
        self.table = CallTable(self.commands.put_nowait)
        self.attached, self.over = asyncio.Event(), asyncio.Event()


class WorkerGateway(environment_pb2_grpc.WorkerServiceServicer):
    """The service to which workers connect with tokens, by a unix socket in a private folder."""

    def __init__(
        self,
        log_dir: Path,
        *,
        server: str = "rollout-server",
        log_bytes: int,
        limits: WorkerLimits = NO_LIMITS,
        takes_tools: bool = True,
    ) -> None:
        """`server` is the id of this server; `log_bytes` limits the log of one worker.

        `limits` hold for each worker. `takes_tools` says that environments may offer tools to the
        model.
        """
        self.limits = limits
        self.takes_tools = takes_tools
        self.server, self.logs = server, WorkerLogs(log_dir, log_bytes)
        # Variables of each worker that begins from now on.
        self.variables: dict[str, str] = {}
        self._folder: OwnedFolder
        # Streams of workers that have not attached yet, by token.
        self._expected: dict[str, WorkerStream] = {}
        # Processes that fork workers, by interpreter.
        self._warm_parents: dict[str, WarmParent] = {}

    async def __aenter__(self) -> Self:
        self.logs.folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(remove_abandoned)
        self._folder = OwnedFolder("sockets")
        self.address = f"unix:{self._folder.path / 'workers.sock'}"
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        environment_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)
        for parent in self._warm_parents.values():
            await asyncio.to_thread(parent.close)
        await asyncio.to_thread(self.logs.trim)
        self._folder.close()

    def warm_parent(self, python: str) -> WarmParent:
        """Returns what forks workers of the interpreter `python`, "" for this process's own."""
        parent = self._warm_parents.get(python)
        if parent is None:
            parent = WarmParent(worker_program(python), _variables() | self.variables)
            self._warm_parents[python] = parent
        return parent

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

        async def write() -> None:
            # A worker that is gone takes no command: its requests end too, and with them this call.
            with contextlib.suppress(grpc.aio.InternalError):
                while True:
                    await context.write(await stream.commands.get())

        async with asyncio.TaskGroup() as group:
            writer = group.create_task(write())
            stream.attached.set()
            try:
                async for message in requests:
                    stream.table.answered(message)
            finally:
                stream.over.set()
                writer.cancel()
