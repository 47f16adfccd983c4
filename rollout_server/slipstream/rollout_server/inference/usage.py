"""The time in which an engine had work, and the watchdog for an engine that makes no step."""

import time
from collections.abc import Callable

from slipstream.rollout_server.engine_interface import EngineDied


class UseClock:
    """Adds up the seconds of pauses, and those with at least one open request outside pauses."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._open = 0
        # A pause counts after the first `resume`: before it there is nothing to pause.
        self.is_paused = self._has_served = False
        # Both sums count up to the time `_counted_s`.
        self._counted_s = now_s()
        self._busy_s = self._paused_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds with an open request, up to now and without pauses."""
        self._count()
        return self._busy_s

    @property
    def paused_s(self) -> float:
        """The seconds of all pauses, up to now."""
        self._count()
        return self._paused_s

    def enter(self) -> None:
        """Records that a request was opened."""
        self._count()
        self._open += 1

    def leave(self) -> None:
        """Records that a request has ended."""
        self._count()
        self._open -= 1

    def pause(self) -> None:
        """Records that no request is served until `resume`."""
        self._count()
        self.is_paused = True

    def resume(self) -> None:
        """Records the end of a pause."""
        self._count()
        self.is_paused, self._has_served = False, True

    def _count(self) -> None:
        before_s, self._counted_s = self._counted_s, self._now_s()
        if self.is_paused and self._has_served:
            self._paused_s += self._counted_s - before_s
        elif self._open and not self.is_paused:
            self._busy_s += self._counted_s - before_s


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
