"""Passes the calls of one agent's episode between its HTTP connections and the rollout server.

Consumes: HTTP requests, parts of the server's replies. Produces: calls for the server, parts for
the connections. Waits for: the next call, the next part of a reply, a reader of that part.
Unblocked by: a request, a part, a client that hangs up, or `end`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slipstream.v1 import environment_pb2 as pb

# Calls of one episode that may be read, or wait for their replies, at one time.
MAX_OPEN_CALLS = 64
# Bytes of request bodies of one episode that are read, or wait for the server, at one time.
MAX_WAITING_BYTES = 32 << 20


class TooManyCalls(Exception):
    """The episode has MAX_OPEN_CALLS open calls, or MAX_WAITING_BYTES of waiting requests."""


@dataclass(eq=False)
class PendingCall:
    """One call of the model by an agent, from its request to the last part of its reply."""

    number: int
    # Parts of the reply, each of which is done when the client has taken it. None means that no
    # more parts come.
    parts: asyncio.Queue[pb.ReplyPart | None] = field(default_factory=asyncio.Queue)


class CallExchange:
    """The open calls of one episode of an agent.

    `reading` counts a call while its body arrives, and `open` queues it. The rollout server's side
    takes it with `next` and answers with `part` until a part has `is_last`; then `close` forgets
    it. A `close` before the last part means that the client hung up. After `end`, `next` returns
    None, open calls get no more parts, and the gateway refuses new calls.
    """

    def __init__(self, on_waiting: Callable[[bool], None]) -> None:
        """Takes a callback that gets True when a first call opens, False when the last closes."""
        self._on_waiting = on_waiting
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        # Number of requests whose bodies are being read, and of their bytes read so far.
        self.num_reading = self._read_bytes = 0
        # Messages that the server has not taken yet.
        self._outbox: list[pb.AgentCall] = []
        self._changed = asyncio.Event()
        # Whether the episode takes no more calls.
        self.has_ended = False

    @property
    def num_waiting_bytes(self) -> int:
        """Number of bytes of request bodies that are being read, or that wait for the server."""
        return self._read_bytes + sum(len(message.body) for message in self._outbox)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[bytes], None]]:
        """Reserves a call while its body is read; yields a function to call with each part of it.

        Entering the block raises TooManyCalls beyond MAX_OPEN_CALLS, the function beyond
        MAX_WAITING_BYTES.
        """
        if len(self._calls) + self.num_reading >= MAX_OPEN_CALLS:
            raise TooManyCalls
        num_bytes = 0

        def count(part: bytes) -> None:
            nonlocal num_bytes
            if self.num_waiting_bytes + len(part) > MAX_WAITING_BYTES:
                raise TooManyCalls
            num_bytes += len(part)
            self._read_bytes += len(part)

        self.num_reading += 1
        try:
            yield count
        finally:
            self.num_reading -= 1
            self._read_bytes -= num_bytes

    def open(self, request: pb.AgentCall) -> PendingCall:
        """Numbers and queues a request, and returns the open call; not after `end`."""
        assert not self.has_ended
        self._num_calls += 1
        request.call = self._num_calls
        call = self._calls[request.call] = PendingCall(request.call)
        self._outbox.append(request)
        self._changed.set()
        if len(self._calls) == 1:
            self._on_waiting(True)
        return call

    def close(self, call: PendingCall) -> None:
        """Removes a call; tells a server that has taken it and not sent the last part."""
        _drop_parts(call)
        if self._calls.pop(call.number, None) is None:
            return
        if not self.has_ended:
            waiting = [message for message in self._outbox if message.call != call.number]
            if len(waiting) == len(self._outbox):
                waiting.append(pb.AgentCall(call=call.number, is_abandoned=True))
                self._changed.set()
            self._outbox = waiting
        if not self._calls:
            self._on_waiting(False)

    async def next(self) -> pb.AgentCall | None:
        """Waits for the next message for the server and returns it; returns None after `end`."""
        while not self._outbox and not self.has_ended:
            self._changed.clear()
            await self._changed.wait()
        return None if self.has_ended else self._outbox.pop(0)

    async def part(self, part: pb.ReplyPart) -> None:
        """Passes a part to its client until it is taken; drops it if the client hung up."""
        call = self._calls.get(part.call)
        if call is None:
            return
        call.parts.put_nowait(part)
        if part.is_last:
            del self._calls[part.call]
            if not self._calls:
                self._on_waiting(False)
        await call.parts.join()

    def end(self) -> None:
        """Ends all open calls; `next` returns None from now on."""
        self.has_ended = True
        self._outbox.clear()
        self._changed.set()
        for call in self._calls.values():
            _drop_parts(call)
            call.parts.put_nowait(None)


def _drop_parts(call: PendingCall) -> None:
    while not call.parts.empty():
        call.parts.get_nowait()
        call.parts.task_done()
