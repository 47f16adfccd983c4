"""Connections to a listener, each with its first line.

All connections are read at the same time, so that a silent one does not delay the others.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import NamedTuple

HELLO_LIMIT_S = 5.0
LINE_BYTES = 65536
# Largest number of connections without a complete line; one more closes the oldest.
MOST_SILENT = 64
# Seconds of one wait: closing the listener in another thread does not end a wait for it.
_LOOK_PERIOD_S = 0.1


class Call(NamedTuple):
    """A connection and its first line; `rest` has the bytes received after the line."""

    connection: socket.socket
    line: bytes
    rest: bytes


class Callers:
    """Accepts callers for one thread inside `with`; the end closes connections without a line."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        hello_limit_s: float = HELLO_LIMIT_S,
        most_silent: int = MOST_SILENT,
    ) -> None:
        """A connection has `hello_limit_s` for its line; `most_silent` may wait without one."""
        self._listener = listener
        self._hello_limit_s, self._most_silent = hello_limit_s, most_silent
        self._selector = selectors.DefaultSelector()
        # Bytes so far of each connection, and the time by which its line must end.
        self._silent: dict[socket.socket, tuple[bytearray, float]] = {}

    def __enter__(self) -> Callers:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._silent):
            self._leave(connection)
        self._selector.close()

    def next(self, until_s: float, abandoned: threading.Event | None = None) -> Call:
        """Returns the next caller with a complete line.

        Raises TimeoutError at `until_s` on the monotonic clock, or soon after `abandoned` is set.
        Raises OSError when the listener was closed.
        """
        while True:
            self._drop_late()
            left_s = until_s - time.monotonic()
            if left_s <= 0 or (abandoned is not None and abandoned.is_set()):
                raise TimeoutError
            ready = self._selector.select(min(left_s, _LOOK_PERIOD_S))
            if self._listener.fileno() < 0:
                raise OSError("the listener was closed")
            for key, _ in ready:
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif connection in self._silent:
                    call = self._hear(connection)
                    if call is not None:
                        return call

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._silent) == self._most_silent:
                self._leave(next(iter(self._silent)))
            self._silent[connection] = bytearray(), time.monotonic() + self._hello_limit_s
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> Call | None:
        said, _ = self._silent[connection]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        said += data
        if b"\n" in said:
            self._forget(connection)
            line, _, rest = bytes(said).partition(b"\n")
            return Call(connection, line, rest)
        if not data or len(said) > LINE_BYTES:
            self._leave(connection)
        return None

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for connection, (_, until_s) in list(self._silent.items()):
            if now_s > until_s:
                self._leave(connection)

    def _leave(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._silent[connection]
        self._selector.unregister(connection)
