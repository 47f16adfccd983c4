"""The protocol by which a sender of weights and its receivers take turns on shared buffers.

The sender listens on a socket in the folder of shared memory, which nobody but its user opens. A
receiver's first message has its communicator and rank, and the sender answers with the buffers.
From then on both sides send numbers of 8 bytes. Buckets are counted from 0 over the communicator's
lifetime. The sender sends n when bucket n may be read. A receiver sends 0 when it has opened the
buffers, and n + 1 when it has read bucket n. A buffer is filled again when all receivers have read
it. When a connection ends, the communicator ends, so that no process waits for a dead process.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.protocol.weights.publish_waits import reason
from slipstream.protocol.weights.shared_buffers import FOLDER, PREFIX

HELLO_LIMIT_S = 5.0
# Most seconds of one wait, because closing the listener in another thread does not end a wait.
_LOOK_PERIOD_S = 0.1
_MESSAGE_BYTES = 65536
_NUMBER_BYTES = 8
# Numbers from a receiver: 0 says that all buffers are open, n + 1 that bucket n was read.
_OPENED = 0
_FIRST = 1
# Errors from a message that neither a `HandoverSender` nor a `HandoverReceiver` wrote.
_UNREADABLE = (OSError, ValueError, TypeError, RecursionError)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class _Peer:
    """A connection to the other side, and the count of numbers received from it."""

    connection: socket.socket
    what: str
    # Count of numbers received from the other side.
    done: int = 0

    def tell(self, number: int) -> None:
        try:
            self.connection.sendall(number.to_bytes(_NUMBER_BYTES, "little"))
        except OSError as error:
            raise WeightSyncError(f"{self.what} is gone: {error}") from error

    def wait(self, number: int, deadline_s: float) -> None:
        """Waits for `number`. Raises WeightSyncError after `deadline_s` or without a connection."""
        until_s = time.monotonic() + deadline_s
        while self.done <= number:
            try:
                # Even after the deadline, a number that is already here is read.
                self.connection.settimeout(max(until_s - time.monotonic(), 1e-3))
                data = self.connection.recv(_NUMBER_BYTES)
            except TimeoutError:
                raise WeightSyncError(f"{self.what} was not done within {deadline_s:g} s") from None
            except OSError as error:
                raise WeightSyncError(f"{self.what} is gone: {error}") from error
            if not data:
                raise WeightSyncError(f"{self.what} is gone")
            if (number_sent := int.from_bytes(data, "little")) != self.done:
                raise WeightSyncError(f"{self.what} said {number_sent}, not {self.done}")
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

    def __init__(self, communicator_id: str) -> None:
        """Listens at `path`. Raises ConfigError if there can be no socket."""
        self.path = FOLDER / f"{PREFIX}{secrets.token_hex(8)}"
        self._communicator_id = communicator_id
        self._peers: dict[int, _Peer] = {}
        self._listener = _socket()
        try:
            self._listener.bind(str(self.path))
            self.path.chmod(0o600)
            self._listener.listen()
        except OSError as error:
            self.close()
            cause = f"weights.transport ipc needs a socket at {self.path}: {error}"
            raise ConfigError(cause) from None

    def accept(
        self,
        ranks: Sequence[int],
        handles: Sequence[str],
        num_bytes: int,
        deadline_s: float,
        abandoned: threading.Event | None = None,
    ) -> None:
        """Waits until the receivers of these ranks have opened the buffers of `num_bytes` each.

        There is one of `handles` for each buffer; buckets use the buffers in turn. Raises
        WeightSyncError after `deadline_s`, and soon after `abandoned` is set.
        """
        until_s = time.monotonic() + deadline_s
        waiting = set(ranks)
        while waiting:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or (abandoned is not None and abandoned.is_set()):
                missing = ", ".join(map(str, sorted(waiting)))
                raise WeightSyncError(
                    f"receivers {missing} of {self._communicator_id} did not join "
                    f"{reason(deadline_s, abandoned)}"
                )
            try:
                self._listener.settimeout(min(left_s, _LOOK_PERIOD_S))
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                raise WeightSyncError(f"{self._communicator_id} is closed: {error}") from error
            connection.settimeout(HELLO_LIMIT_S)
            try:
                communicator_id, rank = json.loads(connection.recv(_MESSAGE_BYTES))
                is_expected = communicator_id == self._communicator_id and rank in waiting
                if is_expected:
                    connection.sendall(json.dumps([handles, num_bytes]).encode())
            except _UNREADABLE:
                is_expected = False
            if is_expected:
                waiting.remove(rank)
                self._peers[rank] = _Peer(connection, f"receiver {rank}")
            else:
                connection.close()
        # Nothing stays behind when this process is killed.
        self.path.unlink(missing_ok=True)
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
        self.path.unlink(missing_ok=True)
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    def _wait(self, count: int, until_s: float) -> None:
        for peer in self._peers.values():
            peer.wait(count, max(until_s - time.monotonic(), 0.0))


class HandoverReceiver(_Peer):
    """A receiver's side of the shared buffers; one thread uses it, any thread may call `close`.

    Call `opened` once. Then, for each bucket, call `wait`, read the bucket, and call `read` to tell
    the sender that the bucket was read. After `close` the sender fails at its next wait.
    """

    def __init__(self, path: str, communicator_id: str, rank: int, deadline_s: float) -> None:
        """Connects to the sender's socket `path`; receives the buffers' handles and their size.

        Raises WeightSyncError when the sender does not answer in `deadline_s`.
        """
        connection = _socket()
        try:
            connection.settimeout(deadline_s)
            connection.connect(path)
            connection.sendall(json.dumps([communicator_id, rank]).encode())
            handles, num_bytes = json.loads(connection.recv(_MESSAGE_BYTES))
            self.handles, self.num_bytes = tuple(handles), int(num_bytes)
        except _UNREADABLE as error:
            connection.close()
            raise WeightSyncError(
                f"could not join communicator {communicator_id} within {deadline_s:g} s: {error}; "
                f"weights.transport ipc works within one host, whose processes share {FOLDER}"
            ) from error
        super().__init__(connection, f"the sender of {communicator_id}")

    def opened(self) -> None:
        """Tells the sender that this receiver has opened the buffers."""
        self.tell(_OPENED)

    def read(self, number: int) -> None:
        """Tells the sender that this receiver has finished reading bucket `number`."""
        self.tell(number + _FIRST)


def host_id() -> str:
    """Returns an id that only the processes and containers of one running machine share."""
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _socket() -> socket.socket:
    # Messages arrive whole.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
