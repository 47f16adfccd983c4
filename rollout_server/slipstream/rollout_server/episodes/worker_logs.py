"""What environment workers print, in files that do not grow without end.

Consumes: pipes, each the output of one worker and of all that it has started. Produces: files.
Waits for: output, on a thread, so that a worker that prints never waits for the server's loop.
Unblocked by: output, the ends of the pipes, `close`. Its owner sees in `watch` when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import selectors
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from slipstream.protocol.errors import RunFailed

log = logging.getLogger(__name__)

_READ_BYTES = 65536
# The longest pipe that Linux gives to anybody: so much may wait when the logs are closed.
_MAX_PIPE_BYTES = 1 << 20
_HEALTH_PERIOD_S = 0.5
# What a full pipe of each worker takes on any disk that works.
_CLOSE_LIMIT_S = 10.0


class BoundedLog:
    """A file of at most half of `max_bytes`, and the one before it, `PATH.1`, of as much.

    So the last half is always there. A file begins with a whole line, unless one line alone is
    longer than a file. Goes on with the files that are there.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        # Of what stands at the head of a file beside output.
        self._note_bytes = 0

    def write(self, output: bytes) -> None:
        """Appends; OSError as of a file."""
        while output:
            room = max(0, self._max_bytes // 2 - self._size)
            part = output
            if len(output) > room:
                part = output[: output.rfind(b"\n", 0, room) + 1]
                if not part and self._size <= self._note_bytes:
                    part = output[:room]
            if not part:
                self._begin_another()
                continue
            written = self._file.write(part)
            self._size += written
            output = output[written:]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _begin_another(self) -> None:
        before = self.path.with_name(f"{self.path.name}.1")
        self.path.replace(before)
        full, self._file = self._file, self.path.open("ab", buffering=0)
        full.close()
        note = (
            f"slipstream: the lines before these are in {before.name}, older ones were removed: "
            f"rollout_server.environment_log_mib = {self._max_bytes / (1 << 20):g}\n"
        )
        self._size = 0
        self._size = self._note_bytes = self._file.write(note.encode())


class WorkerLogs:
    """The logs of all workers of a server, written by a thread of its own."""

    def __init__(
        self, folder: Path, max_bytes: int, *, close_limit_s: float = _CLOSE_LIMIT_S
    ) -> None:
        """Each worker's log has at most `max_bytes`."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._close_limit_s = close_limit_s
        self._logs: dict[str, BoundedLog] = {}
        self._new: queue.SimpleQueue[tuple[int, BoundedLog]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._complained: set[BoundedLog] = set()
        self._thread = threading.Thread(target=self._run, name="worker-logs", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def output(self, name: str) -> Iterator[int]:
        """The end of a pipe for a process that is started in the block; its log has this name."""
        if name not in self._logs:
            self._logs[name] = BoundedLog(self._folder / name, self._max_bytes)
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._new.put((read, self._logs[name]))
        os.write(self._wake_write, b"+")
        try:
            yield write
        finally:
            os.close(write)

    async def watch(self) -> None:
        """RunFailed when nothing is written any more: workers would wait for their full pipes."""
        while self._thread.is_alive():
            await asyncio.sleep(_HEALTH_PERIOD_S)
        raise RunFailed("what environment workers print is written no more; the cause stands above")

    def close(self) -> None:
        """Writes what was printed until now; for a server whose workers have ended.

        A disk that does not answer keeps it for no longer than the limit.
        """
        os.close(self._wake_write)
        self._thread.join(self._close_limit_s)
        if self._thread.is_alive():
            log.warning(
                "%s: what environment workers printed last was not written within %g s",
                self._folder,
                self._close_limit_s,
            )

    def _run(self) -> None:
        try:
            self._copy_all()
        finally:
            for each in list(self._logs.values()):
                each.close()

    def _copy_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            is_open = True
            while is_open:
                for key, _ in selector.select():
                    if key.fd == self._wake_read:
                        is_open = bool(os.read(key.fd, 1))
                        while not self._new.empty():
                            pipe, own = self._new.get()
                            selector.register(pipe, selectors.EVENT_READ, own)
                    elif self._copy(key.fd, key.data) == 0:
                        selector.unregister(key.fd)
                        os.close(key.fd)
            for key in list(selector.get_map().values()):
                self._close_pipe(key.fd, key.data)

    def _close_pipe(self, pipe: int, own: BoundedLog | None) -> None:
        """Takes what a pipe holds now: what a worker left behind may print for ever."""
        left = _MAX_PIPE_BYTES if own is not None else 0
        with contextlib.suppress(BlockingIOError):
            while left > 0 and own is not None and (copied := self._copy(pipe, own)):
                left -= copied
        os.close(pipe)

    def _copy(self, pipe: int, own: BoundedLog) -> int:
        """Bytes that were read; 0 at the end of the pipe."""
        output = os.read(pipe, _READ_BYTES)
        try:
            own.write(output)
        except OSError as error:
            # The worker must not wait for a disk that is full.
            if own not in self._complained:
                self._complained.add(own)
                log.warning("%s: %s; what is printed is lost", own.path, error.strerror)
        return len(output)
