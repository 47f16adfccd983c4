"""When an engine had work."""

from __future__ import annotations

import time

# More than a heartbeat's worth; beyond it the oldest intervals are joined.
_MAX_INTERVALS = 256


class UseClock:
    """Seconds with at least one open request, and their intervals of the Unix clock."""

    def __init__(self) -> None:
        self._open = 0
        self._started_s = 0.0
        self._busy_s = 0.0
        self._intervals: list[tuple[float, float]] = []

    @property
    def busy_s(self) -> float:
        """The sum of all intervals, the one that goes on included."""
        return self._busy_s + (time.time() - self._started_s if self._open else 0.0)

    def enter(self) -> None:
        """One more request is open."""
        if not self._open:
            self._started_s = time.time()
        self._open += 1

    def leave(self) -> None:
        """One request ended."""
        self._open -= 1
        if not self._open:
            self._cut(time.time())

    def take_intervals(self) -> tuple[tuple[float, float], ...]:
        """The intervals since the last call; one that goes on is cut here."""
        if self._open:
            self._cut(time.time())
        taken, self._intervals = tuple(self._intervals), []
        return taken

    def _cut(self, now_s: float) -> None:
        self._busy_s += now_s - self._started_s
        if len(self._intervals) >= _MAX_INTERVALS:
            self._started_s = self._intervals.pop()[0]
        self._intervals.append((self._started_s, now_s))
        self._started_s = now_s
