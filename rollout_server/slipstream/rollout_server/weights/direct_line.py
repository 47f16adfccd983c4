"""A line of sockets between the server and its engine's workers, which bypasses vLLM.

vLLM takes a call, and its answer, through two queues and three threads, each of which must wake up.
That takes half a millisecond to the workers and more back, for an update that is 3 ms on the wire.
vLLM's processes are forked from the server's, and each worker inherits one end of a socket pair.

Most calls go through vLLM; workers answer them both through vLLM and on the line. Two kinds of call
may use only the line, and run in a second thread of each worker: the beginning of an update of an
idle engine, and the end of an update that was begun. Meanwhile the engine's own thread outputs
tokens and preempts requests.

The engine also sends marks: one when a pause is complete, one when it takes steps again. vLLM
reports both too, but after the outputs of the last step, which take milliseconds with hundreds of
requests.

Consumes: calls to all workers, marks. Produces: their answers, from vLLM or the line, whichever is
faster. Waits for: the answers. Unblocked by: the answers, vLLM's errors, or the end of the line.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from slipstream.rollout_server.engine_interface import EngineDied

_MAX_BYTES = 1 << 20

# The workers' sockets. The server holds them until its engine has started; every process forked
# meanwhile inherits them.
_inherited: list[socket.socket] = []


def tell(mark: str) -> None:
    """Sends `mark`, the name of an event, to the server for all workers, if there is a line."""
    for theirs in _inherited:
        _send(theirs, [mark, None])


def _send(line: socket.socket, message: list[Any], flags: int = socket.MSG_DONTWAIT) -> None:
    # Drops a message that is too long, finds no room or comes after the line was closed.
    with contextlib.suppress(OSError):
        line.send(json.dumps(message).encode(), flags)


class WorkerEnd:
    """The worker's side of the line, in the process of `rank`; does nothing if there is no line."""

    def __init__(self, rank: int) -> None:
        self._socket = _inherited[rank] if rank < len(_inherited) else None
        self._thread: threading.Thread | None = None

    def answer(self, call: int, answer: dict[str, Any]) -> None:
        """Sends the answer to call number `call` to the server.

        If the line is full, the thread of `serve` waits for room. Any other thread drops the
        answer, which also goes through vLLM.
        """
        if self._socket is not None:
            is_alone = threading.current_thread() is self._thread
            _send(self._socket, [call, answer], 0 if is_alone else socket.MSG_DONTWAIT)

    def tell(self, mark: str) -> None:
        """Sends `mark`, the name of an event in this worker, to the server."""
        if self._socket is not None:
            _send(self._socket, [mark, None])

    def serve(self, methods: Mapping[str, Callable[[int], object]]) -> None:
        """Starts a thread that runs the method named by each call, with the call's number."""
        line = self._socket
        if line is None or self._thread is not None:
            return

        def answer_calls() -> None:
            while data := line.recv(_MAX_BYTES):
                number, method = json.loads(data)
                methods[method](number)

        self._thread = threading.Thread(target=answer_calls, name="direct-line", daemon=True)
        self._thread.start()


class DirectLine:
    """The server's side of the line.

    line = DirectLine(num_workers)  # before the engine's processes start
    line.listen()  # when they have started
    await line.answers(call)  # through vLLM; afterwards the line `is_up`
    await line.call("begin")  # only through the line
    line.close()
    """

    def __init__(self, num_workers: int) -> None:
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_workers)
        ]
        self._sockets = [ours for ours, _ in pairs]
        _inherited[:] = [theirs for _, theirs in pairs]
        for ours in self._sockets:
            ours.setblocking(False)
        self._numbers = itertools.count(1)
        # The answers so far and the future of all answers, by the number of each call under way, or
        # by the mark.
        self._heard: dict[int | str, tuple[list[Any], asyncio.Future[list[Any]]]] = {}
        # Whether all workers have answered here.
        self.is_up = False
        # The future of the newest call that went only through the line.
        self._alone: asyncio.Future[list[Any]] | None = None

    def listen(self) -> None:
        """Starts to receive answers, in the running event loop."""
        # The engine's processes hold the only other copies: the line ends when they do.
        for theirs in _inherited:
            theirs.close()
        _inherited.clear()
        for ours in self._sockets:
            asyncio.get_running_loop().add_reader(ours, self._read, ours)

    async def answers(self, call: Callable[[int], Awaitable[list[Any]]]) -> list[Any]:
        """Makes a call through vLLM; returns the workers' answers, in any order.

        `call` is called with the number that the workers must put on their answers. Raises the
        error of `call`, unless the workers answered first. A call that was made runs to its end,
        even if its caller no longer waits.
        """
        number = next(self._numbers)
        with self.marked(number) as found:
            through_vllm = asyncio.ensure_future(call(number))
            through_vllm.add_done_callback(functools.partial(_pass_on, found))
            return await found

    async def call(self, method: str) -> list[Any]:
        """Returns all workers' answers to a call on the line. Raises EngineDied if the line ends.

        Call it only if the line `is_up`, one call after another.
        """
        number = next(self._numbers)
        with self.marked(number) as found:
            self._alone = found
            try:
                for ours in self._sockets:
                    ours.send(json.dumps([number, method]).encode())
            except OSError as error:
                raise EngineDied(f"the line to a worker of the engine: {error}") from error
            return await found

    @contextlib.contextmanager
    def marked(self, mark: int | str) -> Iterator[asyncio.Future[list[Any]]]:
        """Yields a future that is done when all workers have sent `mark` during the block.

        An answer has the number of its call in place of a mark. The future's result has each
        worker's answer, or None for a mark.
        """
        found: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._heard[mark] = [], found
        try:
            yield found
        finally:
            del self._heard[mark]

    def close(self) -> None:
        """Closes the line: no further answer is received, and calls on it raise EngineDied."""
        self.is_up = False
        if self._alone is not None and not self._alone.done():
            self._alone.set_exception(EngineDied("the engine is gone"))
        for ours in self._sockets:
            if ours.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(ours)
                ours.close()

    def _read(self, ours: socket.socket) -> None:
        if self._hear(ours):
            return
        # The other workers' answers may have arrived before this one's end.
        for others in self._sockets:
            self._hear(others)
        # Every process that held the other end is gone; calls through vLLM get vLLM's error.
        self.close()

    def _hear(self, ours: socket.socket) -> bool:
        """Reads all messages that have arrived; returns False if the stream has ended."""
        while True:
            try:
                data = ours.recv(_MAX_BYTES)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                # A worker that left a call unread resets the line before its end can be read.
                continue
            if not data:
                return False
            number, answer = json.loads(data)
            answers, found = self._heard.get(number, ([], None))
            answers.append(answer)
            if found is not None and len(answers) == len(self._sockets) and not found.done():
                # Marks come before the workers listen.
                self.is_up |= isinstance(number, int)
                found.set_result(answers)


def _pass_on(found: asyncio.Future[list[Any]], through_vllm: asyncio.Future[list[Any]]) -> None:
    """Sets `found` to vLLM's answers or error, unless the line was faster."""
    if through_vllm.cancelled():
        found.cancel()
    # Reading the error tells asyncio that somebody has seen it.
    elif (error := through_vllm.exception()) is not None and not found.done():
        found.set_exception(error)
    elif not found.done():
        found.set_result(through_vllm.result())
