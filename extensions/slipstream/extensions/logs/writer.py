"""Writes a log of bounded size: `python -m slipstream.extensions.logs.writer LOG < output`.

With --process and --run each line becomes a JSON object. The program ends with its input, which is
when the last process that writes to it has ended, and no signal to these reaches it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.extensions.logs.lines import as_objects

# A longer line is cut into several.
MAX_LINE_BYTES = 1 << 20


class BoundedLog:
    """A log that is moved to NAME.1 before it would be larger than `max_bytes`.

    Nothing raises: what cannot be written, as on a full disk, is lost, and the next line is tried.
    """

    def __init__(self, path: Path, *, max_bytes: int, moved_logs: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._moved_logs = moved_logs
        self._descriptor = -1
        self._size = 0

    def write(self, text: str) -> None:
        """Appends a line."""
        data = f"{text}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self._max_bytes:
                self.close()
                self._move()
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._descriptor = os.open(self._path, flags, 0o644)
                self._size = os.fstat(self._descriptor).st_size
                if self._size and self._size + len(data) > self._max_bytes:
                    # A log of a start before this one.
                    self.write(text)
                    return
            while data:
                num_written = os.write(self._descriptor, data)
                self._size += num_written
                data = data[num_written:]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._size = 0

    def _move(self) -> None:
        names = [
            self._path.with_name(f"{self._path.name}.{n + 1}") for n in range(self._moved_logs)
        ]
        places = [self._path, *names]
        for source, target in reversed(list(zip(places, places[1:], strict=False))):
            with contextlib.suppress(FileNotFoundError):
                source.replace(target)


def lines_of(descriptor: int) -> Iterator[str]:
    """Yields the lines of a pipe as soon as they are there, at most `MAX_LINE_BYTES` long."""
    with open(descriptor, "rb", closefd=False) as stream:
        while data := stream.readline(MAX_LINE_BYTES):
            yield data.decode(errors="replace").rstrip("\n")


def main() -> int:
    """Writes until the input ends."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--moved-logs", type=int, required=True)
    parser.add_argument("--process", default="")
    parser.add_argument("--run", default="")
    options = parser.parse_args()
    log = BoundedLog(options.log, max_bytes=options.max_bytes, moved_logs=options.moved_logs)
    lines = lines_of(sys.stdin.fileno())
    if options.process:
        lines = as_objects(lines, options.process, options.run, time.time)
    for line in lines:
        log.write(line)
    log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
