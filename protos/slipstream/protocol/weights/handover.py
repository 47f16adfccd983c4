"""The protocol by which a sender of weights and its receivers take turns on shared buffers.

Each receiver has one TCP connection to the sender, on the host of `learner.master`. The receiver
sends its communicator, rank and host. The sender answers with the shared buffers, or refuses. From
then on both sides send numbers of 8 bytes. Buckets are counted from 0 over the communicator's
lifetime. The sender sends n when bucket n may be read. A receiver sends 0 when it has opened the
buffers, and n + 1 when it has read bucket n. A buffer is filled again when all receivers have read
it. When a connection ends, the communicator ends, so that no process waits for a dead process.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.machine.address import listen
from slipstream.protocol.weights.waits import reason

HELLO_LIMIT_S = 5.0
LINE_BYTES = 65536
# Largest number of connections without a complete line; one more closes the oldest.
MOST_SILENT = 64
# Most seconds of one wait, because closing the listener in another thread does not end a wait.
_LOOK_PERIOD_S = 0.1
_NUMBER = struct.Struct("<Q")
# Numbers from a receiver: 0 says that all buffers are open, n + 1 that bucket n was read.
_OPENED, _FIRST = 0, 1
_RULE = "weights.transport ipc works within one host, set nccl"
# Errors from a first line that neither a `HandoverSender` nor a `HandoverReceiver` wrote.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Call(NamedTuple):
    """A connection and its first line; `rest` has the bytes received after the line."""

    connection: socket.socket
    line: bytes
    rest: bytes


class Callers:
    """Accepts connections inside a `with` block, for one thread, and reads each one's first line.

    All connections are read at the same time, so that a silent connection does not delay others.
    The end of the block closes the connections without a complete line.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        hello_limit_s: float = HELLO_LIMIT_S,
        most_silent: int = MOST_SILENT,
    ) -> None:
        """Takes the limits: seconds for a first line, and number of connections without one."""
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
        """Waits for the next connection with a complete line, and returns it.

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


@dataclass(frozen=True)
class Offer:
    """The buffers that a sender shares with its receivers."""

    # One handle to open each buffer; buckets use the buffers in turn.
    handles: tuple[str, ...]
    # Size of each buffer.
    num_bytes: int


@dataclass
class _Peer:
    """A connection to the other side, and the count of numbers received from it."""

    connection: socket.socket
    what: str
    # Count of numbers received from the other side.
    done: int = 0
    received: bytearray = field(default_factory=bytearray)

    def tell(self, number: int) -> None:
        try:
            self.connection.sendall(_NUMBER.pack(number))
        except OSError as error:
            raise WeightSyncError(f"{self.what} is gone: {error}") from error

    def wait(self, number: int, deadline_s: float) -> None:
        """Waits for `number`. Raises WeightSyncError after `deadline_s` or without a connection."""
        until_s = time.monotonic() + deadline_s
        self._take(b"")
        while self.done <= number:
            try:
                # Even after the deadline, data that is already here is read.
                self.connection.settimeout(max(until_s - time.monotonic(), 1e-3))
                data = self.connection.recv(4096)
            except TimeoutError:
                raise WeightSyncError(f"{self.what} was not done within {deadline_s:g} s") from None
            except OSError as error:
                raise WeightSyncError(f"{self.what} is gone: {error}") from error
            if not data:
                raise WeightSyncError(f"{self.what} is gone")
            self._take(data)

    def _take(self, data: bytes) -> None:
        self.received += data
        while len(self.received) >= _NUMBER.size:
            (named,) = _NUMBER.unpack_from(self.received)
            del self.received[: _NUMBER.size]
            if named != self.done:
                raise WeightSyncError(f"{self.what} said {named}, not {self.done}")
            self.done += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # `close` alone would not wake a thread that waits.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class HandoverSender:
    """The sender's side of the shared buffers; one thread uses it, any thread may call `close`.

    Call `accept` once. Then, for each bucket, fill a buffer and call `filled`. Before the buffer is
    filled again, call `wait_read` for that bucket.
    """

    def __init__(
        self, host: str, communicator_id: str, *, hello_limit_s: float = HELLO_LIMIT_S
    ) -> None:
        """Listens on a free port of `host`, and raises ConfigError like `listen_for_members`.

        A receiver has `hello_limit_s` to send its first line, and as long to take the offer.
        """
        self._listener = listen_for_members(host)
        self._communicator_id, self._hello_limit_s = communicator_id, hello_limit_s
        self._peers: dict[int, _Peer] = {}

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept(
        self,
        ranks: Sequence[int],
        offer: Offer,
        deadline_s: float,
        abandoned: threading.Event | None = None,
    ) -> None:
        """Waits until the receivers of these ranks have opened the buffers.

        Raises WeightSyncError after `deadline_s`, soon after `abandoned` is set, and if a receiver
        runs on another host, where it could not open the buffers.
        """
        until_s = time.monotonic() + deadline_s
        waiting = set(ranks)
        try:
            with Callers(self._listener, hello_limit_s=self._hello_limit_s) as callers:
                while waiting:
                    call = callers.next(until_s, abandoned)
                    if not self._welcome(call, waiting, offer):
                        call.connection.close()
        except TimeoutError:
            missing = ", ".join(map(str, sorted(waiting)))
            raise WeightSyncError(
                f"receivers {missing} of {self._communicator_id} did not join "
                f"{reason(deadline_s, abandoned)}"
            ) from None
        except (OSError, ValueError) as error:
            # ValueError: the listener was closed before the wait for it began.
            raise WeightSyncError(f"{self._communicator_id} is closed: {error}") from error
        self._wait(_OPENED, until_s)

    def filled(self, number: int) -> None:
        """Tells all receivers that bucket `number` is complete in its buffer.

        Raises WeightSyncError if a receiver is gone.
        """
        for peer in self._peers.values():
            peer.tell(number)

    def wait_read(self, number: int, deadline_s: float) -> None:
        """Waits until all receivers have read bucket `number`.

        Raises WeightSyncError after `deadline_s`, or if a receiver is gone.
        """
        self._wait(number + _FIRST, time.monotonic() + deadline_s)

    def close(self) -> None:
        """Ends all connections: every waiting receiver fails at once."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    def _wait(self, count: int, until_s: float) -> None:
        for peer in self._peers.values():
            peer.wait(count, max(until_s - time.monotonic(), 0.0))

    def _welcome(self, call: Call, waiting: set[int], offer: Offer) -> bool:
        """Sends the offer to an expected receiver; returns False for other callers.

        Raises WeightSyncError for a receiver on another host.
        """
        connection = call.connection
        try:
            hello = json.loads(call.line)
            rank, host = hello["rank"], hello["host"]
            named = str(hello["communicator_id"]).encode()
            if not hmac.compare_digest(named, self._communicator_id.encode()):
                return False
            if rank not in waiting:
                return False
            answer: dict[str, object] = {"handles": offer.handles, "num_bytes": offer.num_bytes}
            refusal = "" if host == host_id() else f"receiver {rank} runs on another host: {_RULE}"
            if refusal:
                answer = {"refusal": refusal}
            connection.settimeout(self._hello_limit_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except _UNREADABLE:
            return False
        if refusal:
            connection.close()
            raise WeightSyncError(refusal)
        waiting.remove(rank)
        self._peers[rank] = _Peer(connection, f"receiver {rank}", received=bytearray(call.rest))
        return True


class HandoverReceiver:
    """A receiver's side of the shared buffers; one thread uses it, any thread may call `close`.

    Call `opened` once. Then, for each bucket, call `wait_filled`, read the bucket, and call `read`
    to tell the sender that the bucket was read.
    """

    def __init__(
        self, address: tuple[str, int], communicator_id: str, rank: int, deadline_s: float
    ) -> None:
        """Connects to the sender at `address` and receives its offer.

        Raises WeightSyncError when the sender refuses or does not answer in `deadline_s`.
        """
        until_s = time.monotonic() + deadline_s
        what = f"the sender of {communicator_id}"
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection(address, timeout=deadline_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = {"communicator_id": communicator_id, "rank": rank, "host": host_id()}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            line, rest = _read_line(connection, until_s)
            answer = json.loads(line)
            refusal = answer.get("refusal", "")
            if not refusal:
                self.offer = Offer(tuple(answer["handles"]), int(answer["num_bytes"]))
        except _UNREADABLE as error:
            if connection is not None:
                connection.close()
            raise WeightSyncError(
                f"could not join communicator {communicator_id} within {deadline_s:g} s: {error}"
            ) from error
        if refusal:
            connection.close()
            raise WeightSyncError(refusal)
        self._peer = _Peer(connection, what, received=bytearray(rest))

    def opened(self) -> None:
        """Tells the sender that this receiver has opened the buffers."""
        self._peer.tell(_OPENED)

    def wait_filled(self, number: int, deadline_s: float) -> None:
        """Waits until bucket `number` may be read.

        Raises WeightSyncError after `deadline_s`, or if the sender is gone.
        """
        self._peer.wait(number, deadline_s)

    def read(self, number: int) -> None:
        """Tells the sender that this receiver has finished reading bucket `number`."""
        self._peer.tell(number + _FIRST)

    def close(self) -> None:
        """Closes the connection; the sender fails at its next wait for this receiver."""
        self._peer.close()


def listen_for_members(host: str) -> socket.socket:
    """Returns a listening socket on a free port of `host`.

    Raises ConfigError if `host` is not an address of this machine.
    """
    try:
        return listen(host)
    except OSError as error:
        raise ConfigError(
            f"learner.master must be an address of this machine, got {host}: {error}"
        ) from error


def host_id() -> str:
    """Returns an id that only the processes and containers of one running machine share."""
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _read_line(connection: socket.socket, until_s: float) -> tuple[bytes, bytes]:
    """Returns the first line, and the bytes received after it.

    Raises OSError after `until_s`, or if the connection ends first.
    """
    data = b""
    while b"\n" not in data:
        connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        more = connection.recv(4096)
        if not more or len(data) > LINE_BYTES:
            raise OSError("the connection ended before its first line")
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest
