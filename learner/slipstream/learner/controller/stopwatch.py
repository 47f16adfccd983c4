"""A clock that can stand still. Pure: times come from the caller, in seconds of any one clock."""

from __future__ import annotations


class Stopwatch:
    """Adds up the time in which it runs."""

    def __init__(self) -> None:
        self._running_since_s: float | None = None
        self._total_s = 0.0

    def note(self, now_s: float, *, running: bool) -> None:
        """Whether it runs from now on."""
        self._total_s = self.total_s(now_s)
        self._running_since_s = now_s if running else None

    def reset(self, now_s: float) -> None:
        """From now on it counts from 0, and runs if it did."""
        self._total_s = 0.0
        if self._running_since_s is not None:
            self._running_since_s = now_s

    def total_s(self, now_s: float) -> float:
        """Seconds until now in which it ran."""
        since_s = self._running_since_s
        return self._total_s + (0.0 if since_s is None else now_s - since_s)
