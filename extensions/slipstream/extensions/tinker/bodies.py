"""Bodies of requests, and one budget of bytes for all that the HTTP process holds of them.

Consumes: parts of bodies. Produces: whole bodies, unpacked. Waits for: the next part. Unblocked by:
its arrival, the end of the connection, or the deadline of the request.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.extensions.tinker.request_fields import Refused
from starlette.requests import Request

MAX_BODY_BYTES = 24 << 20
# Most bytes of a larger request that are read, unpacked, to find whose turn it has.
MAX_READ_BYTES = 4 * MAX_BODY_BYTES
# Most bytes of all requests together, of whatever key: half-written, unpacked or being answered.
MAX_HELD_BYTES = 256 << 20
_READ_BYTES = 1 << 20


class HeldBody:
    """The body of one request."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.data = bytearray()
        # Whether its bytes went, so that another one's had room.
        self.is_dropped = False

    async def read(self, request: Request) -> None:
        """Reads the body; raises Refused if it is too large, or the process holds too much."""
        async for part in request.stream():
            self._add(part)
        self._bodies.reading.pop(self, None)

    async def unpack(self) -> None:
        """Puts what a body of zstd holds in its place; raises Refused if it holds too much."""
        import pyarrow

        packed = self.data
        self.data = bytearray()
        self._bodies.held_bytes -= len(packed)
        try:
            with pyarrow.input_stream(pyarrow.py_buffer(packed), compression="zstd") as stream:
                while part := await asyncio.to_thread(stream.read, _READ_BYTES):
                    self._add(part)
        except OSError as error:
            raise Refused(f"the body is no zstd: {error}") from error
        self._bodies.reading.pop(self, None)

    def _add(self, part: bytes) -> None:
        check_size(self.data, len(part), MAX_READ_BYTES)
        self._bodies.make_room(self, len(part))
        self.data += part


class Bodies:
    """The bodies that the process holds."""

    def __init__(self) -> None:
        self.held_bytes = 0
        # Bodies that are not whole, first those whose newest part came longest ago.
        self.reading: dict[HeldBody, None] = {}

    @contextmanager
    def body(self) -> Iterator[HeldBody]:
        """Yields the body of a request, whose bytes count until the request is answered."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self._drop(body)

    def make_room(self, body: HeldBody, num_bytes: int) -> None:
        """Counts bytes of a body; others that are not whole go, first those that wait longest.

        Raises Refused, to be sent again, if the body itself has gone, or there is no room.
        """
        self.reading.pop(body, None)
        while self.held_bytes + num_bytes > MAX_HELD_BYTES and self.reading:
            oldest = next(iter(self.reading))
            oldest.is_dropped = True
            self._drop(oldest)
        if body.is_dropped or self.held_bytes + num_bytes > MAX_HELD_BYTES:
            cause = f"requests of {MAX_HELD_BYTES} bytes are under way: send this one again"
            raise Refused(cause, 503)
        self.held_bytes += num_bytes
        self.reading[body] = None

    def _drop(self, body: HeldBody) -> None:
        self.reading.pop(body, None)
        self.held_bytes -= len(body.data)
        body.data = bytearray()


def check_size(data: bytes | bytearray, further: int, most: int) -> None:
    """Raises Refused if a request of `data` and `further` bytes has more than `most`."""
    if len(data) + further > most:
        raise Refused(f"a request has at most {MAX_BODY_BYTES} bytes, got {len(data) + further}")
