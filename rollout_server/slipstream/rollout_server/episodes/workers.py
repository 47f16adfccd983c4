"""The environment worker processes of this server, and the local service to which they attach.

Consumes: environment specs. Produces: call tables of workers that have loaded one.
Waits for: a worker to attach, to load, to exit. Unblocked by: the worker, or the limit of the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from slipstream.protocol.access.security import CHANNEL_OPTIONS, TOKEN_KEY
from slipstream.protocol.access.socket_folder import make_socket_folder, remove_socket_folder
from slipstream.protocol.errors import EnvironmentFailed
from slipstream.rollout_server.episodes.calls import CallTable
from slipstream.rollout_server.episodes.worker_logs import WorkerLogs
from slipstream.rollout_server.process import worker_environment
from slipstream.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

WORKER_PROGRAM = (sys.executable, "-m", "slipstream.client.worker")
_MAX_QUEUED_COMMANDS = 65_536
_START_LIMIT_S = 60.0
_PING_LIMIT_S = 5.0
_STOP_LIMIT_S = 2.0


class WorkerGateway(environment_pb2_grpc.WorkerServiceServicer):
    """The local service: a unix socket in a folder of mode 0700, a token for each worker."""

    def __init__(
        self,
        log_dir: Path,
        *,
        server: str = "rollout-server",
        program: Sequence[str] = WORKER_PROGRAM,
        log_bytes: int,
    ) -> None:
        """`server`: the id under which a killed one starts again; it removes what that left.

        `log_bytes`: limit of what is kept of one worker's output.
        """
        self.log_dir = log_dir
        self.server = server
        self._socket_note = log_dir / f"{server}.sockets"
        self.program = tuple(program)
        self._log_bytes = log_bytes
        self.logs: WorkerLogs
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._folder = Path()
        # Workers that were started and did not attach yet.
        self._expected: dict[str, EnvironmentWorker] = {}

    @property
    def address(self) -> str:
        """Where workers attach."""
        return f"unix:{self._folder / 'workers.sock'}"

    async def __aenter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = WorkerLogs(self.log_dir, self._log_bytes)
        self._folder = make_socket_folder(self._socket_note)
        environment_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._server.stop(grace=0)
        await asyncio.to_thread(self.logs.close)
        remove_socket_folder(self._socket_note)

    def expect(self, worker: EnvironmentWorker) -> str:
        """The token with which this worker will attach."""
        token = secrets.token_urlsafe(32)
        self._expected[token] = worker
        return token

    def forget(self, worker: EnvironmentWorker) -> None:
        """The worker is gone: its token opens nothing any more."""
        self._expected = {t: w for t, w in self._expected.items() if w is not worker}

    async def Attach(  # noqa: N802 - the name of the service's method
        self,
        requests: AsyncIterator[environment_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[
            environment_pb2.WorkerMessage, environment_pb2.WorkerCommand
        ],
    ) -> None:
        """One worker, from its hello to its end."""
        shown = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        worker = self._expected.pop(str(shown).removeprefix("Bearer "), None)
        if worker is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown worker")
        hello = await anext(requests)
        if hello.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is a hello")
        commands: asyncio.Queue[environment_pb2.WorkerCommand] = asyncio.Queue(_MAX_QUEUED_COMMANDS)

        async def write() -> None:
            while True:
                await context.write(await commands.get())

        async with asyncio.TaskGroup() as group:
            writer = group.create_task(write())
            table = CallTable(commands.put_nowait)
            worker.attached(table)
            try:
                async for message in requests:
                    table.answered(message)
            finally:
                worker.detached()
                writer.cancel()


class EnvironmentWorker:
    """One worker process, from its start to its exit; it is not started again."""

    def __init__(self, gateway: WorkerGateway, spec: environment_pb2.EnvironmentSpec) -> None:
        self._gateway = gateway
        self._spec = spec
        self._attached: asyncio.Future[CallTable] = asyncio.get_running_loop().create_future()
        self._suspected, self._left, self._gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.open_episodes = 0

    @property
    def table(self) -> CallTable:
        """Its calls; only once it is loaded."""
        return self._attached.result()

    def attached(self, table: CallTable) -> None:
        """The gateway has the worker's stream."""
        if not self._attached.done():
            self._attached.set_result(table)

    def detached(self) -> None:
        """The worker's stream is over."""
        self._left.set()

    def suspect(self) -> None:
        """A call was not answered in time: look whether the worker still lives."""
        self._suspected.set()

    async def run(self, index: int, loaded: Callable[[int], None]) -> EnvironmentFailed:
        """Runs until the worker is gone, and says why; `loaded` takes the number of tasks.

        Open calls fail with the same cause. When cancelled, the process is gone as well.
        """
        try:
            process = await self._start(index)
        except OSError as error:
            # Of processes, for one: environments may use up what the machine has.
            self._gateway.forget(self)
            cause = f"no worker could be started: {error.strerror}"
            return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, cause)
        try:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(self._watch_exit(process)),
                    group.create_task(self._watch_stream(process)),
                    group.create_task(self._watch_answers(process)),
                ]
                try:
                    return await self._serve(loaded)
                finally:
                    for watch in watches:
                        watch.cancel()
        finally:
            self._gateway.forget(self)
            if self._attached.done() and self._attached.exception() is None:
                unloaded = trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE
                self.table.end(unloaded, "the environment was unloaded")
            await _stop(process)

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        token = self._gateway.expect(self)
        name = re.sub(r"[^\w.-]", "_", self._spec.name)
        # Servers of one machine write into the same folder.
        log_name = f"{self._gateway.server}-environment-{name}-{index}.log"
        with self._gateway.logs.output(log_name) as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipstream.protocol.process"),
                *self._gateway.program,
                *("--connect", self._gateway.address),
                env=worker_environment(os.environ, token),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _serve(self, loaded: Callable[[int], None]) -> EnvironmentFailed:
        load = environment_pb2.WorkerCommand(load=environment_pb2.LoadCommand(spec=self._spec))
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                # A wait that is given up would cancel what it waits for.
                table = await asyncio.shield(self._attached)
            answer = await table.call(load, timeout_s=max(self._spec.timeout_s, _START_LIMIT_S))
            loaded(answer.loaded.num_tasks)
            await self._gone.wait()
            # Fails with the cause.
            table.notify(environment_pb2.WorkerCommand(ping=environment_pb2.PingCommand()))
        except EnvironmentFailed as error:
            return error
        except TimeoutError:
            cause = f"worker did not attach within {_START_LIMIT_S:g} s"
            return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause)
        raise AssertionError("a worker that is gone takes no call")

    async def _watch_exit(self, process: asyncio.subprocess.Process) -> None:
        cause = f"worker exited with code {await process.wait()}"
        if self._attached.done():
            self.table.end(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause)
        else:
            failed = EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause)
            self._attached.set_exception(failed)
        self._gone.set()

    async def _watch_stream(self, process: asyncio.subprocess.Process) -> None:
        await self._left.wait()
        # It is about to exit; its code says more than the end of its stream.
        await asyncio.sleep(_STOP_LIMIT_S)
        _signal(process, signal.SIGKILL)

    async def _watch_answers(self, process: asyncio.subprocess.Process) -> None:
        ping = environment_pb2.WorkerCommand(ping=environment_pb2.PingCommand())
        while True:
            await self._suspected.wait()
            self._suspected.clear()
            try:
                await self.table.call(ping, timeout_s=_PING_LIMIT_S)
            except EnvironmentFailed:
                _signal(process, signal.SIGKILL)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends the process and everything that it started; returns when it is gone."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_LIMIT_S):
                await process.wait()
    _signal(process, signal.SIGKILL)
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
