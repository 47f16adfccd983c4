"""Starts processes of one program through a fork server, which has imported the program once.

Consumes: answers of the fork server. Produces: processes. Waits for: the imports of the fork
server, before the first process. Unblocked by: the end of these imports, or of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.client.launch.children import Child, open_log, start_child
from slipstream.client.launch.placement import uses_gpus
from slipstream.core.machine.descendants import kernel_oom_kills
from slipstream.core.machine.process import below_this

PROGRAM = "slipstream.core.machine.fork_server"
# Seconds in which a server that has imported the program must fork: SIGSTOP may have stopped it.
ANSWER_LIMIT_S = 15.0


class ForkedProcess:
    """A process that a fork server has forked, with the interface of asyncio's `Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Waits for the end of the process; returns its exit code, or minus a signal's number."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Records the exit code of the process, which has ended."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()


class _Server(asyncio.SubprocessProtocol):
    """The process of a fork server; asyncio calls the methods that read the server's answers.

    No task reads the answers, because a second signal to this command cancels all tasks.
    """

    def __init__(self) -> None:
        self._forked: dict[int, ForkedProcess] = {}
        self._unread = b""
        # Gets the process that the current order starts, or None when the server ends.
        self.next: asyncio.Future[ForkedProcess | None] | None = None
        self.is_there, self.gone = True, asyncio.Event()

    def order(self, order: object) -> None:
        """Sends `order` to the server as a line of JSON, which is lost if the server has ended."""
        self._orders.write(json.dumps(order).encode() + b"\n")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the server's process and the pipe for orders; called by asyncio."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        orders = transport.get_pipe_transport(0)
        assert isinstance(orders, asyncio.WriteTransport)
        self.process, self._orders = transport, orders

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Handles the server's answers on processes that began or ended; called by asyncio."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            pid = answer["pid"]
            is_known = pid in self._forked
            process = self._forked.setdefault(pid, ForkedProcess(pid))
            if "code" in answer:
                self._forked.pop(pid).end(answer["code"])
            if not is_known:
                # The answer on a known process reports its end, not the start of a new process.
                self._follow(process)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Records that the server and all its processes have ended; called by asyncio."""
        if fd == 1:
            self.is_there = False
            for process in self._forked.values():
                # The kernel ends them with the server.
                process.end(-signal.SIGKILL)
            self._follow(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closes the server's process after its end; called by asyncio."""
        self.process.close()
        self.gone.set()

    def _follow(self, process: ForkedProcess | None) -> None:
        if self.next is not None and not self.next.done():
            self.next.set_result(process)


class ForkServer:
    """Starts processes of a program by forks, one at a time; `close` ends all of them.

    If the server cannot import the program, `start_child` starts the processes, and each reports
    its own error. A server that was killed is started again with the next process. On a machine
    with GPUs no process is forked: imports may start CUDA, which a forked process could not use.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._words = [module, *arguments]
        self._is_plain = uses_gpus() or sys.platform != "linux"
        self._server: _Server | None = None

    async def start(self, name: str, *, log_path: Path, environ: Mapping[str, str] = {}) -> Child:
        """Starts a process with the log `log_path`, and with `environ` added to its variables.

        Raises ConfigError when the log cannot be written.
        """
        if not self._is_plain:
            with open_log(log_path) as log:
                log_start, oom_kills = log.tell(), kernel_oom_kills()
                forked = await self._fork(name, log_path, environ)
                if forked is not None:
                    return Child(name, forked, log_path, log_start, oom_kills)
                log.write(f"{name} starts without a fork server\n".encode())
        module, *arguments = self._words
        return await start_child(name, module, arguments, log_path=log_path, environ=environ)

    async def close(self) -> None:
        """Ends the server, and with it the processes."""
        if self._server is not None:
            self._server.process.close()
            await self._server.gone.wait()

    async def _fork(
        self, name: str, log_path: Path, environ: Mapping[str, str]
    ) -> ForkedProcess | None:
        """Lets the fork server start a process and returns the process.

        If this fails, closes the fork server and returns None.
        """
        server, is_new = self._server, False
        if server is None or not server.is_there:
            server, is_new = await self._begin(name, log_path, environ), True
        server.next = asyncio.get_running_loop().create_future()
        server.order({"name": name, "log": str(log_path.absolute()), "environ": dict(environ)})
        forked = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if is_new else ANSWER_LIMIT_S):
                forked = await server.next
        if forked is None:
            await self.close()
            # What a new server could not do, a further one could not do either.
            self._is_plain = is_new
        return forked

    async def _begin(self, name: str, log_path: Path, environ: Mapping[str, str]) -> _Server:
        # Room for the command lines that the forked processes show.
        filler = name.ljust(len(" ".join([sys.executable, *self._words])))
        with open_log(log_path) as log:
            _, self._server = await asyncio.get_running_loop().subprocess_exec(
                _Server,
                *(*below_this(), sys.executable, "-m", PROGRAM, filler),
                stderr=log,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        self._server.order(self._words)
        return self._server
