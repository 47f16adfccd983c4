"""The time in which an engine had work, and the watchdog for an engine that makes no step."""

import time
from collections.abc import Callable

from slipstream.rollout_server.engine_interface import EngineDied


class UseClock:
    """Adds up the seconds with at least one open request."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._open = 0
        self._started_s = self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds with an open request, up to now."""
        return self._busy_s + (self._now_s() - self._started_s if self._open else 0.0)

    def enter(self) -> None:
        """Records that a request was opened."""
        if not self._open:
            self._started_s = self._now_s()
        self._open += 1

    def leave(self) -> None:
        """Records that a request has ended."""
        self._open -= 1
        if not self._open:
            self._busy_s += self._now_s() - self._started_s


# Seconds without a step after which an engine with requests counts as hung. The limit is longer
# than compiling kernels takes, and shorter than the limit for which the run waits for a batch.
SILENCE_LIMIT_S = 300.0


class EngineWatchdog:
    """Raises EngineDied when an engine that has requests makes no step for too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # time.monotonic of the last check at which the engine had nothing to do.
        self._idle_s = time.monotonic()

    def check(self, *, heard_s: float, num_requests: int) -> None:
        """Raises EngineDied when the engine had requests and made no step within the limit.

        `heard_s` is the time.monotonic of the engine's last step. `num_requests` is the number of
        open requests, or 0 while the engine is paused.
        """
        now_s = time.monotonic()
        if not num_requests:
            self._idle_s = now_s
        elif now_s - max(self._idle_s, heard_s) > self._limit_s:
            raise EngineDied(
                f"vLLM's engine made no step for {self._limit_s:g} s, "
                f"with {num_requests} open requests"
            )
