"""The local service to which environment workers attach.

Consumes: the streams of workers. Produces: call tables of workers that have attached. Waits for:
hellos and answers. Unblocked by: a worker's message, or the end of its stream.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
from slipstream.core.machine.other_python import worker_program
from slipstream.core.machine.owned_folder import OwnedFolder, remove_abandoned
from slipstream.protocol.access.security import CHANNEL_OPTIONS
from slipstream.protocol.access.tokens import TOKEN_KEY
from slipstream.rollout_server.episodes.calls import CallTable
from slipstream.rollout_server.episodes.worker_logs import WorkerLogs
from slipstream.rollout_server.episodes.worker_process import (
    NO_LIMITS,
    WORKER_WAITS,
    WorkerLimits,
    WorkerWaits,
)
from slipstream.v1 import environment_pb2, environment_pb2_grpc

_MAX_QUEUED_COMMANDS = 65_536


class WorkerStream:
    """The stream of one worker process: expected, attached, over."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        # The calls to the worker once it has attached, or why it never will.
        self.table: asyncio.Future[CallTable] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


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
        """`server`: id of this server.

        `log_bytes`: limit of the output kept of one worker; `limits` and `waits` hold for each.
        `takes_tools`: environments may name tools.
        """
        self.limits, self.waits, self.takes_tools = limits, waits, takes_tools
        self.log_dir, self.server = log_dir, server
        self.program, self._log_bytes = program, log_bytes
        self.logs: WorkerLogs
        self._folder: OwnedFolder
        # Streams of workers that have not attached yet, by token.
        self._expected: dict[str, WorkerStream] = {}

    @property
    def address(self) -> str:
        """The address to which workers attach."""
        return f"unix:{self._folder.path / 'workers.sock'}"

    async def __aenter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = WorkerLogs(self.log_dir, self._log_bytes)
        await asyncio.to_thread(remove_abandoned)
        self._folder = OwnedFolder("sockets")
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        environment_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)
        await asyncio.to_thread(self.logs.close)
        self._folder.close()

    def expect(self, stream: WorkerStream) -> None:
        """Lets one worker attach with the token of `stream`."""
        self._expected[stream.token] = stream

    def forget(self, stream: WorkerStream) -> None:
        """Revokes the token of a worker that is gone."""
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
