"""The watchdog for an engine that is alive, has requests and makes no step."""

from __future__ import annotations

import time

from slipstream.rollout_server.engine_interface import EngineDied

# Seconds without a step after which an engine with requests counts as hung. The limit is longer
# than compiling kernels takes, and shorter than the run waits for a batch.
SILENCE_LIMIT_S = 300.0


class EngineWatchdog:
    """Compares the time of the engine's last step with a limit, each time it is checked."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # time.monotonic of the last check at which the engine had nothing to do.
        self._idle_s = time.monotonic()

    def check(self, *, heard_s: float, num_requests: int) -> None:
        """Raises EngineDied when the engine had requests and made no step within the limit.

        `heard_s`: time.monotonic of its last step. `num_requests`: 0 while it is paused.
        """
        now_s = time.monotonic()
        if not num_requests:
            self._idle_s = now_s
        elif now_s - max(self._idle_s, heard_s) > self._limit_s:
            raise EngineDied(
                f"vLLM's engine made no step for {self._limit_s:g} s, "
                f"with {num_requests} open requests"
            )
