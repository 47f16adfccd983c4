"""The calls of one agent's episode, between its HTTP connections and the rollout server.

Consumes: HTTP requests, the server's commands. Produces: answers to both. Waits for: the next call,
the next part of a reply, a reader of that part. Unblocked by: these, a client that hangs up, or
`end`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slipstream.v1 import environment_pb2 as pb

# Calls of one episode that may be read, or wait for their replies, at one time.
MAX_OPEN_CALLS = 64
# Bytes of bodies of one episode that are read, or wait for the server, at one time.
MAX_WAITING_BYTES = 32 << 20


class TooManyCalls(Exception):
    """Raised when an episode has too many open calls, or too many bytes of waiting requests.

    The limits are MAX_OPEN_CALLS and MAX_WAITING_BYTES.
    """


@dataclass(eq=False)
class PendingCall:
    """One call, from its request to the last part of its reply."""

    number: int
    # Parts of the reply, each with the future that tells the server that its client took it. None:
    # there will be no more.
    parts: asyncio.Queue[tuple[pb.ReplyPart, asyncio.Future[None]] | None] = field(
        default_factory=asyncio.Queue
    )


class CallExchange:
    """The calls of one episode.

    A call is counted by reading() while its body arrives, and queued by open(). The server takes it
    by next(), answers by part() until is_last, and close() forgets it. A close() before the last
    part means that the client hung up. After end() next() returns None, open calls get no more
    parts, and new calls are refused.
    """

    def __init__(self, on_waiting: Callable[[bool], None]) -> None:
        """Calls `on_waiting` with True when the first call opens, False when the last closes."""
        self._on_waiting = on_waiting
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        # Requests whose bodies are read, and the bytes of these so far.
        self.num_reading = self._read_bytes = 0
        # Messages that the server has not taken yet.
        self._outbox: list[pb.AgentCall] = []
        self._changed = asyncio.Event()
        # Whether the episode takes no more calls.
        self.has_ended = False

    @property
    def num_waiting_bytes(self) -> int:
        """The bytes of request bodies that are being read, or that wait for the server."""
        return self._read_bytes + sum(len(message.body) for message in self._outbox)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[bytes], None]]:
        """Reserves a call while its body is read; yields a function that counts a part of the body.

        The context manager and the function raise TooManyCalls.
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
        """Numbers a request, and queues it for the server."""
        assert not self.has_ended
        self._num_calls += 1
        request.call = self._num_calls
        call = self._calls[request.call] = PendingCall(request.call)
        self._send(request)
        if len(self._calls) == 1:
            self._on_waiting(True)
        return call

    def close(self, call: PendingCall) -> None:
        """Removes a call; tells the server if it has taken the call but not sent the last part."""
        _drop_parts(call)
        if self._calls.pop(call.number, None) is None:
            return
        if not self.has_ended:
            waiting = [message for message in self._outbox if message.call != call.number]
            if len(waiting) < len(self._outbox):
                self._outbox = waiting
            else:
                self._send(pb.AgentCall(call=call.number, is_abandoned=True))
        self._waits_less()

    async def next(self) -> pb.AgentCall | None:
        """Returns the next message for the server, or None after `end`."""
        while not self._outbox and not self.has_ended:
            self._changed.clear()
            await self._changed.wait()
        return None if self.has_ended else self._outbox.pop(0)

    async def part(self, part: pb.ReplyPart) -> None:
        """Passes a part of a reply to its client; returns when the client has taken it.

        A part of a call that is no longer open is dropped: its client hung up meanwhile.
        """
        call = self._calls.get(part.call)
        if call is None:
            return
        taken = asyncio.get_running_loop().create_future()
        call.parts.put_nowait((part, taken))
        if part.is_last:
            del self._calls[part.call]
            self._waits_less()
        await taken

    def end(self) -> None:
        """Ends all open calls; `next` returns None from now on."""
        self.has_ended = True
        self._outbox.clear()
        self._changed.set()
        for call in self._calls.values():
            _drop_parts(call)
            call.parts.put_nowait(None)

    def _send(self, message: pb.AgentCall) -> None:
        self._outbox.append(message)
        self._changed.set()

    def _waits_less(self) -> None:
        if not self._calls:
            self._on_waiting(False)


def _drop_parts(call: PendingCall) -> None:
    while not call.parts.empty():
        waiting = call.parts.get_nowait()
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(None)
