"""Who may touch a shared buffer when: the words between a sender of weights and its receivers.

One TCP connection for each receiver, on `weights.host`. A receiver says which communicator it is
of, its rank and its host, is told what is shared, or why not, opens it and says so. From then on
all is numbers of 8 bytes: buckets are counted from 0 over the life of the communicator. The
sender's number says that this bucket may be read, the receiver's that it was. A buffer is filled
again when all have read it. A connection that ends is the end of the communicator: nobody waits for
a dead process.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.protocol.access.callers import HELLO_LIMIT_S, LINE_BYTES, Call, Callers
from slipstream.protocol.address import listen
from slipstream.protocol.errors import ConfigError, WeightSyncError
from slipstream.protocol.weights.waits import reason

_NUMBER = struct.Struct("<Q")
# What a receiver says: first that it has opened all, then of each bucket that it was read.
_OPENED, _FIRST = 0, 1
_RULE = "weights.transport ipc works within one host, set nccl"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Offer:
    """What a sender shares with its receivers."""

    # How to open each buffer; buckets use them in turn.
    handles: tuple[str, ...]
    # Of each buffer.
    num_bytes: int


@dataclass
class _Peer:
    """A connection and how far its other end has come."""

    connection: socket.socket
    what: str
    # Numbers that have come from the other end.
    done: int = 0
    received: bytearray = field(default_factory=bytearray)

    def tell(self, number: int) -> None:
        try:
            self.connection.sendall(_NUMBER.pack(number))
        except OSError as error:
            raise WeightSyncError(f"{self.what} is gone: {error}") from error

    def wait(self, number: int, deadline_s: float) -> None:
        """Until `number` has come from the other end; WeightSyncError after `deadline_s`."""
        until_s = time.monotonic() + deadline_s
        self._take(b"")
        while self.done <= number:
            try:
                # At least once without waiting, however late it is.
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
            # Closing alone would not wake a thread that waits.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class HandoverSender:
    """The sender's end; one thread uses it, `close` may come from any."""

    def __init__(self, host: str, communicator_id: str) -> None:
        """Listens on a free port of `host`; ConfigError when it is no address of this machine."""
        try:
            self._listener = listen(host)
        except OSError as error:
            raise ConfigError(
                f"weights.host must be an address of this machine, got {host}: {error}"
            ) from error
        self._communicator_id = communicator_id
        self._peers: dict[int, _Peer] = {}

    @property
    def port(self) -> int:
        """Where receivers connect."""
        return int(self._listener.getsockname()[1])

    def accept(
        self,
        ranks: Sequence[int],
        offer: Offer,
        deadline_s: float,
        abandoned: threading.Event | None = None,
    ) -> None:
        """Waits until the receivers of these ranks have opened it; WeightSyncError after that long.

        Also as soon as `abandoned` is set. Refuses receivers of other hosts: they cannot open what
        is offered.
        """
        until_s = time.monotonic() + deadline_s
        waiting = set(ranks)
        try:
            with Callers(self._listener) as callers:
                while waiting:
                    call = callers.next(until_s, abandoned)
                    if not self._welcome(call, waiting, offer):
                        call.connection.close()
        except TimeoutError:
            missing = ", ".join(map(str, sorted(waiting)))
            raise WeightSyncError(
                f"receivers {missing} of {self._communicator_id} did not come "
                f"{reason(deadline_s, abandoned)}"
            ) from None
        except (OSError, ValueError) as error:
            # ValueError: it was closed before it could be waited for.
            raise WeightSyncError(f"{self._communicator_id} is closed: {error}") from error
        self._wait(_OPENED, until_s)

    def filled(self, number: int) -> None:
        """Bucket `number` lies complete in its buffer."""
        for peer in self._peers.values():
            peer.tell(number)

    def wait_read(self, number: int, deadline_s: float) -> None:
        """Until all have read bucket `number`; WeightSyncError after `deadline_s`."""
        self._wait(number + _FIRST, time.monotonic() + deadline_s)

    def close(self) -> None:
        """Ends all connections: every receiver that waits fails at once."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    def _wait(self, count: int, until_s: float) -> None:
        for peer in self._peers.values():
            peer.wait(count, max(until_s - time.monotonic(), 0.0))

    def _welcome(self, call: Call, waiting: set[int], offer: Offer) -> bool:
        """Tells a receiver that belongs here what is offered; False for others."""
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
            connection.settimeout(HELLO_LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if refusal:
            connection.close()
            raise WeightSyncError(refusal)
        waiting.remove(rank)
        self._peers[rank] = _Peer(connection, f"receiver {rank}", received=bytearray(call.rest))
        return True


class HandoverReceiver:
    """A receiver's end; one thread uses it, `close` may come from any."""

    def __init__(
        self, address: tuple[str, int], communicator_id: str, rank: int, deadline_s: float
    ) -> None:
        """Joins; WeightSyncError when the sender refuses, or is not there within `deadline_s`."""
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
        except (OSError, ValueError, KeyError, TypeError) as error:
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
        """What was offered is open here."""
        self._peer.tell(_OPENED)

    def wait_filled(self, number: int, deadline_s: float) -> None:
        """Until bucket `number` may be read; WeightSyncError after `deadline_s`."""
        self._peer.wait(number, deadline_s)

    def read(self, number: int) -> None:
        """Bucket `number` will not be looked at again."""
        self._peer.tell(number + _FIRST)

    def close(self) -> None:
        """Leaves: the sender fails when it waits for this receiver the next time."""
        self._peer.close()


def host_id() -> str:
    """Equal in all processes and containers of one running machine, and nowhere else."""
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _read_line(connection: socket.socket, until_s: float) -> tuple[bytes, bytes]:
    """The first line, and what has come behind it."""
    data = b""
    while b"\n" not in data:
        connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        more = connection.recv(4096)
        if not more or len(data) > LINE_BYTES:
            raise OSError("the connection ended before its first line")
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest
