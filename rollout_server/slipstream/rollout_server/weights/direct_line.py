"""A line between the server and its engine's workers that does not go through vLLM.

vLLM takes a call, and its answer, through two queues and three threads, each of which must wake up:
half a millisecond there and more back, at an update that is 3 ms on the wire. Its processes are
forked from the server's, and each worker inherits the end of a pair of sockets. All calls but one
go through vLLM, and are answered both ways. The beginning of an update of an engine in which
nothing runs need not wait for its turn: a thread of the worker hears of it on the line.

Consumes: calls to all workers. Produces: their answers, from whichever way is faster.
Waits for: the answers. Unblocked by: them, what vLLM says of its engine, or the end of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from slipstream.rollout_server.inference.generation import EngineDied

_MAX_BYTES = 1 << 20

# The workers' ends, in the server until its engine has started and in all that is forked from it.
_inherited: list[socket.socket] = []


class WorkerEnd:
    """The end of this rank's worker, in its process; without a line it does nothing."""

    def __init__(self, rank: int) -> None:
        self._socket = _inherited[rank] if rank < len(_inherited) else None
        self._thread: threading.Thread | None = None

    def answer(self, call: int, answer: dict[str, Any]) -> None:
        """Sends the answer to the server, if that can hear it."""
        if self._socket is not None:
            # Too long, or nobody reads any more: vLLM brings it too.
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps([call, answer]).encode(), socket.MSG_DONTWAIT)

    def serve(self, begin: Callable[[int], object]) -> None:
        """From now on `begin` is called in a thread, with the number of each call on the line."""
        if self._socket is None or self._thread is not None:
            return
        arguments = (self._socket, begin)
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="direct-line", daemon=True
        )
        self._thread.start()


def _serve(line: socket.socket, begin: Callable[[int], object]) -> None:
    while data := line.recv(_MAX_BYTES):
        begin(json.loads(data))


class DirectLine:
    """The server's end. Make it before the engine's processes, `listen` when they are there."""

    def __init__(self, num_workers: int) -> None:
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_workers)
        ]
        self._sockets = [ours for ours, _ in pairs]
        _inherited[:] = [theirs for _, theirs in pairs]
        for ours in self._sockets:
            ours.setblocking(False)
        self._num_calls = 0
        # For each call under way, by its number: the answers so far, and the future of them all.
        self._heard: dict[int, tuple[list[Any], asyncio.Future[list[Any]]]] = {}
        # Whether all workers have answered here.
        self.is_up = False
        # The call on the line that was begun last.
        self._beginning: asyncio.Future[list[Any]] | None = None

    def listen(self) -> None:
        """From now on answers are heard, in the loop that runs."""
        # Only the engine's processes hold them now: a line ends with these.
        for theirs in _inherited:
            theirs.close()
        _inherited.clear()
        for ours in self._sockets:
            asyncio.get_running_loop().add_reader(ours, self._read, ours)

    async def answers(self, call: Callable[[int], Awaitable[list[Any]]]) -> list[Any]:
        """Returns all workers' answers to `call`, which is given the number of the call.

        The answers come in any order. Raises what `call` raises, unless the workers were faster. A
        call that was made is made to its end, also when nobody waits for it any more.
        """
        with self._open() as (number, found):
            through_vllm = asyncio.ensure_future(call(number))
            through_vllm.add_done_callback(functools.partial(_pass_on, found))
            return await found

    async def begin(self) -> list[Any]:
        """Returns all workers' answers to a call on the line; EngineDied when that ends.

        For a line that `is_up`.
        """
        with self._open() as (number, found):
            self._beginning = found
            try:
                for ours in self._sockets:
                    ours.send(json.dumps(number).encode())
            except OSError as error:
                raise EngineDied(f"the line to a worker of the engine: {error}") from error
            return await found

    def close(self) -> None:
        """Hears nothing any more."""
        self.is_up = False
        for ours in self._sockets:
            if ours.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(ours)
                ours.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[int, asyncio.Future[list[Any]]]]:
        self._num_calls += 1
        number = self._num_calls
        found: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._heard[number] = [], found
        try:
            yield number, found
        finally:
            del self._heard[number]

    def _read(self, ours: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := ours.recv(_MAX_BYTES):
                number, answer = json.loads(data)
                answers, found = self._heard.get(number, ([], None))
                answers.append(answer)
                if found is not None and len(answers) == len(self._sockets) and not found.done():
                    self.is_up = True
                    found.set_result(answers)
            # All that held the other end are gone; vLLM tells those that called through it.
            self.close()
            if self._beginning is not None and not self._beginning.done():
                self._beginning.set_exception(EngineDied("the engine is gone"))


def _pass_on(found: asyncio.Future[list[Any]], through_vllm: asyncio.Future[list[Any]]) -> None:
    """What vLLM brought, unless it is late: then its errors are of no interest either."""
    if through_vllm.cancelled():
        found.cancel()
        return
    error = through_vllm.exception()
    if found.done():
        return
    if error is not None:
        found.set_exception(error)
    else:
        found.set_result(through_vllm.result())
