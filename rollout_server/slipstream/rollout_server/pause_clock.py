"""The time during which generation was paused for new weights."""

from __future__ import annotations

import time


class PauseClock:
    """Seconds of all pauses, by `time.monotonic`; a pause that has begun counts up to now."""

    def __init__(self) -> None:
        # The time at which the present pause began; None: there is none.
        self.begun_s: float | None = None
        self._ended_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all pauses so far."""
        return self._ended_s + (0.0 if self.begun_s is None else time.monotonic() - self.begun_s)

    def begin(self) -> None:
        """Begins a pause, unless one has begun."""
        if self.begun_s is None:
            self.begun_s = time.monotonic()

    def end(self, now_s: float) -> float:
        """Ends the pause, if one has begun; returns its seconds."""
        seconds = 0.0 if self.begun_s is None else now_s - self.begun_s
        self._ended_s += seconds
        self.begun_s = None
        return seconds
