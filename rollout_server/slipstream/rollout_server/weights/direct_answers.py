"""Answers of an engine's workers that come straight to the server, beside those that vLLM brings.

vLLM takes an answer through two queues and three threads, each of which must wake up. Its processes
are forked from the server's: they inherit one end of a pair of sockets and answer there first.

Consumes: calls to all workers. Produces: their answers, from whichever way is faster.
Waits for: one of the two. Unblocked by: the engine's answer or its death, which vLLM reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

_MAX_BYTES = 1 << 20

# The workers' end, in the server until its engine has started and in all that is forked from it.
_inherited: socket.socket | None = None


def answer_directly(call: int, answer: dict[str, Any]) -> None:
    """Tells the server what this worker answers to the call of this number, if it can hear it."""
    if _inherited is not None:
        # Too long, or nobody reads any more: vLLM brings it too.
        with contextlib.suppress(OSError):
            _inherited.send(json.dumps([call, answer]).encode())


class DirectAnswers:
    """The server's end. Make it before the engine's processes, `listen` when they are there."""

    def __init__(self) -> None:
        global _inherited  # noqa: PLW0603 - what is forked has nothing else in common
        self._socket, _inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        _inherited.setblocking(False)
        self._num_workers = 0
        self._num_calls = 0
        # By the number of a call that is under way: what was heard, and who waits for all of it.
        self._heard: dict[int, tuple[list[Any], asyncio.Future[list[Any]]]] = {}

    def listen(self, num_workers: int) -> None:
        """From now on answers of so many workers are heard, in the loop that runs."""
        global _inherited  # noqa: PLW0603
        if _inherited is not None:
            # Only the workers hold it now: it is closed when they are gone.
            _inherited.close()
            _inherited = None
        self._num_workers = num_workers
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def of(self, call: Callable[[int], Awaitable[list[Any]]]) -> list[Any]:
        """All workers' answers to `call`, which is given the number of the call.

        In any order. Raises what `call` raises, unless the workers were faster. A call that was
        made is made to its end, also when nobody waits for it any more.
        """
        self._num_calls += 1
        number = self._num_calls
        found: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._heard[number] = [], found
        through_vllm = asyncio.ensure_future(call(number))
        through_vllm.add_done_callback(functools.partial(_pass_on, found))
        try:
            return await found
        finally:
            del self._heard[number]

    def close(self) -> None:
        """Hears nothing any more."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self._socket.recv(_MAX_BYTES):
                number, answer = json.loads(data)
                answers, found = self._heard.get(number, ([], None))
                answers.append(answer)
                if found is not None and len(answers) == self._num_workers and not found.done():
                    found.set_result(answers)
            self.close()


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
