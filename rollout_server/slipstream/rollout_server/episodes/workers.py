"""The environment worker processes of this server, and the local service to which they attach.

Consumes: environment specs. Produces: call tables of workers that have loaded one.
Waits for: a worker to attach, to load, to exit. Unblocked by: the worker, or the limit of the wait.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from slipstream.protocol.access.security import CHANNEL_OPTIONS, TOKEN_KEY
from slipstream.protocol.access.socket_folder import make_socket_folder, remove_socket_folder
from slipstream.protocol.errors import EnvironmentFailed
from slipstream.protocol.other_python import worker_program
from slipstream.rollout_server.episodes.calls import AgentEnd, CallTable, StreamSession, check_tools
from slipstream.rollout_server.episodes.suspects import Suspects
from slipstream.rollout_server.episodes.worker_logs import WorkerLogs
from slipstream.rollout_server.episodes.worker_process import (
    NO_LIMITS,
    WORKER_WAITS,
    WorkerLimits,
    WorkerProcess,
    WorkerWaits,
)
from slipstream.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

_MAX_QUEUED_COMMANDS = 65_536
_STOP_LIMIT_S = 2.0


class WorkerGateway(environment_pb2_grpc.WorkerServiceServicer):
    """The service to which workers attach: a unix socket in a folder of mode 0700, with tokens."""

    def __init__(
        self,
        log_dir: Path,
        *,
        server: str = "rollout-server",
        program: Callable[[str], Sequence[str]] = worker_program,
        log_bytes: int,
        limits: WorkerLimits = NO_LIMITS,
        waits: WorkerWaits = WORKER_WAITS,
        takes_tools: bool = True,
    ) -> None:
        """`server`: id of this server. One that starts again after a kill removes its old socket.

        `log_bytes`: limit of the output kept of one worker; `limits` and `waits` hold for each.
        `takes_tools`: environments may name tools.
        """
        self.limits, self.waits, self.takes_tools = limits, waits, takes_tools
        self.log_dir, self.server = log_dir, server
        self._socket_note = log_dir / f"{server}.sockets"
        self.program = program
        self._log_bytes = log_bytes
        self.logs: WorkerLogs
        self._folder = Path()
        # Workers that were started and have not attached yet, by token.
        self._expected: dict[str, EnvironmentWorker] = {}

    @property
    def address(self) -> str:
        """The address to which workers attach."""
        return f"unix:{self._folder / 'workers.sock'}"

    async def __aenter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = WorkerLogs(self.log_dir, self._log_bytes)
        self._folder = make_socket_folder(self._socket_note)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
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
        """Returns the token with which this worker will attach."""
        token = secrets.token_urlsafe(32)
        self._expected[token] = worker
        return token

    def forget(self, worker: EnvironmentWorker) -> None:
        """Revokes the token of a worker that is gone."""
        self._expected = {t: w for t, w in self._expected.items() if w is not worker}

    async def Attach(  # noqa: N802 - the name of the service's method
        self,
        requests: AsyncIterator[environment_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[
            environment_pb2.WorkerMessage, environment_pb2.WorkerCommand
        ],
    ) -> None:
        """Serves one worker, from its hello to its end."""
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
    """One worker process, from its start to its exit; it is not started again.

    started -> attached -> loaded -> open episodes -> ended: all of them are lost
    """

    def __init__(
        self,
        gateway: WorkerGateway,
        spec: environment_pb2.EnvironmentSpec,
        suspects: Suspects,
        *,
        try_reset: bool = False,
    ) -> None:
        """`try_reset`: the first task must answer `reset` before the worker counts as loaded.

        An agent must also make its first call, which is not answered.

        `suspects` is told which tasks were lost with the worker, and which have passed.
        """
        self._gateway = gateway
        self._spec, self._suspects = spec, suspects
        self._try_reset = try_reset
        self._attached: asyncio.Future[CallTable] = asyncio.get_running_loop().create_future()
        self._left, self._gone = asyncio.Event(), asyncio.Event()
        self._process: WorkerProcess
        # Open episodes by key, and the task of each.
        self.episodes: dict[str, int] = {}
        # Why the server ended the worker, and the episode that blocked it, "" if unknown.
        self._hang: EnvironmentFailed | None = None
        self._culprit = ""

    @property
    def table(self) -> CallTable:
        """The calls to this worker; only after it has attached."""
        return self._attached.result()

    def attached(self, table: CallTable) -> None:
        """Takes the calls on the worker's stream from the gateway."""
        if not self._attached.done():
            self._attached.set_result(table)

    def detached(self) -> None:
        """Notes that the worker's stream is over."""
        self._left.set()

    def open(
        self,
        episode_key: str,
        task_index: int,
        timeout_s: float,
        *,
        closed: Callable[[bool], None] = lambda _: None,
    ) -> StreamSession:
        """Opens a session; `closed` is told whether the episode was judged and did no harm."""

        def on_close(was_judged: bool) -> None:
            self.episodes.pop(episode_key, None)
            has_passed = was_judged and self.table.is_open
            if has_passed:
                self._suspects.passed(task_index)
            closed(has_passed)

        self.episodes[episode_key] = task_index
        return StreamSession(
            self.table,
            episode_key,
            timeout_s,
            on_timeout=partial(self._examine, episode_key),
            on_close=on_close,
        )

    async def run(self, index: int, loaded: Callable[[int], None]) -> EnvironmentFailed:
        """Runs until the worker is gone, and returns why; `loaded` takes the number of tasks.

        Open calls fail with the same cause. The process is gone after a cancellation too.
        """
        try:
            self._process = await self._start(index)
        except OSError as error:
            # Environments may use up the processes that the machine can have, for one.
            self._gateway.forget(self)
            cause = f"no worker could be started: {error.strerror}"
            return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE, cause)
        try:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(self._watch_exit()),
                    group.create_task(self._watch_stream()),
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
            await self._process.close()

    async def _start(self, index: int) -> WorkerProcess:
        token = self._gateway.expect(self)
        name = re.sub(r"[^\w.-]", "_", self._spec.name)
        # The servers of one machine write into the same folder.
        log_name = f"{self._gateway.server}-environment-{name}-{index}.log"
        command = [*self._gateway.program(self._spec.python), "--connect", self._gateway.address]
        with self._gateway.logs.output(log_name) as log:
            return await WorkerProcess.start(
                command, limits=self._gateway.limits, token=token, log=log
            )

    async def _serve(self, loaded: Callable[[int], None]) -> EnvironmentFailed:
        load = environment_pb2.WorkerCommand(load=environment_pb2.LoadCommand(spec=self._spec))
        limit_s = self._gateway.waits.start_s
        try:
            async with asyncio.timeout(limit_s):
                # A wait that ends at its limit would cancel the future.
                table = await asyncio.shield(self._attached)
            answer = await table.call(load, timeout_s=max(self._spec.timeout_s, limit_s))
            if self._try_reset:
                await self._reset_once()
            loaded(answer.loaded.num_tasks)
            await self._gone.wait()
            # Raises the cause, since the worker is gone.
            table.notify(environment_pb2.WorkerCommand(ping=environment_pb2.PingCommand()))
        except EnvironmentFailed as error:
            return error
        except TimeoutError:
            cause = f"worker did not attach within {limit_s:g} s"
            return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause)
        raise AssertionError("a worker that is gone takes no call")

    async def _reset_once(self) -> None:
        session = self.open("first-reset", 0, self._spec.timeout_s)
        try:
            opening = await session.reset(0, 0)
            check_tools(opening.tools, takes_tools=self._gateway.takes_tools)
            if opening.is_agent:
                await self._see_first_call(session)
        finally:
            session.close()

    async def _see_first_call(self, session: StreamSession) -> None:
        """Waits for the first call of an agent, which is not answered; EnvironmentFailed."""
        limit_s = self._spec.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                message = await session.next_call()
        except TimeoutError:
            late = EnvironmentFailed(
                trajectory_pb2.FAILURE_KIND_TIMEOUT,
                f"the agent did not call the model within {limit_s:g} s, the environment's "
                f"timeout_s",
            )
            raise await session.examine(late) from None
        if isinstance(message, AgentEnd):
            cause = "run() ended without a call to its endpoint"
            raise EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause)

    async def _watch_exit(self) -> None:
        ended = await self._process.wait()
        if not self._attached.done():
            cause = f"{ended} before it attached: see its log" if self._spec.python else ended
            failed = EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, cause)
            self._attached.set_exception(failed)
        elif self.table.is_open:
            calls = self._process.calls()
            place = f" ({calls.place})" if calls.current in self.episodes else ""
            self._lose(f"{ended}{place}", calls.running)
        self._gone.set()

    def _lose(self, cause: str, in_call: Collection[str]) -> None:
        """Fails all calls; no attempt counts where several episodes shared the worker."""
        tasks = self.episodes
        self._suspects.lost(tasks.values(), in_call=[tasks[key] for key in in_call if key in tasks])
        kind = trajectory_pb2.FAILURE_KIND_ENVIRONMENT
        if len(tasks) > 1:
            kind = trajectory_pb2.FAILURE_KIND_BYSTANDER
            cause = f"{cause}; {len(tasks)} episodes shared it"
        self.table.end(kind, cause)

    async def _watch_stream(self) -> None:
        await self._left.wait()
        # The worker is about to exit; its code says more than the end of its stream.
        await asyncio.sleep(_STOP_LIMIT_S)
        self._process.end()

    async def _examine(self, key: str, late: EnvironmentFailed) -> EnvironmentFailed:
        """Returns an error that says where an episode hangs; ends a worker that does not answer."""
        ping = environment_pb2.WorkerCommand(ping=environment_pb2.PingCommand(episode_key=key))
        try:
            answer = await self.table.call(ping, timeout_s=self._gateway.waits.ping_s)
        except EnvironmentFailed as error:
            if error.kind != trajectory_pb2.FAILURE_KIND_TIMEOUT:
                # The worker ended meanwhile, perhaps because another episode found this one hang.
                return self._hang if self._hang and key == self._culprit else error
        else:
            return _at(late, answer.pong.place)
        if self._hang is None:
            calls = self._process.calls()
            self._culprit = calls.current or (key if len(self.episodes) == 1 else "")
            self._hang = _at(late, calls.place)
            self._lose(str(self._hang), {self._culprit})
            self._process.end()
        if key == self._culprit:
            return self._hang
        kind = trajectory_pb2.FAILURE_KIND_BYSTANDER
        return EnvironmentFailed(kind, f"another episode held up its worker: {self._hang}")


def _at(late: EnvironmentFailed, place: str) -> EnvironmentFailed:
    return EnvironmentFailed(late.kind, f"{late} ({place})") if place else late
