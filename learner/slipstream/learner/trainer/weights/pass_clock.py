"""The clock of a pass over the weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class PassClock:
    """Measures some parts of a pass, in device time on a GPU."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream, self._total_s = stream, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measures the work inside the context."""
        if self._stream is None:
            started = time.monotonic()
            yield
            self._total_s += time.monotonic() - started
            return
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def total_s(self) -> float:
        """Returns the measured seconds; the stream must have finished the measured work."""
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in self._events)
        return self._total_s + milliseconds / 1e3
