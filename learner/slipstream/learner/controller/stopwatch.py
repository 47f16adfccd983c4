"""A stopwatch. Pure: the caller passes all times, in seconds of the same clock."""

from __future__ import annotations


class Stopwatch:
    """Adds up the seconds in which it runs."""

    def __init__(self) -> None:
        self._running_since_s: float | None = None
        self._total_s = 0.0

    def note(self, now_s: float, *, running: bool) -> None:
        """Lets the stopwatch run, or stops it, from `now_s` on."""
        self._total_s = self.total_s(now_s)
        self._running_since_s = now_s if running else None

    def reset(self, now_s: float) -> None:
        """Sets the total to 0; the stopwatch keeps running if it ran."""
        self._total_s = 0.0
        if self._running_since_s is not None:
            self._running_since_s = now_s

    def total_s(self, now_s: float) -> float:
        """Seconds until `now_s` in which the stopwatch ran."""
        since_s = self._running_since_s
        return self._total_s + (0.0 if since_s is None else now_s - since_s)
