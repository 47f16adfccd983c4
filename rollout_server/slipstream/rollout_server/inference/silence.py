"""An engine that is there, has work and does nothing."""

from __future__ import annotations

import time

from slipstream.rollout_server.inference.generation import EngineDied

# What a step may take before an engine with requests is taken for hung; compiled kernels included,
# and less than the run waits for a batch.
SILENCE_LIMIT_S = 300.0


class Silence:
    """Looked at now and then, while the engine lives."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # When the engine had nothing to do last.
        self._idle_s = time.monotonic()

    def look(self, *, heard_s: float, num_requests: int) -> None:
        """EngineDied when it had requests and told of no step for longer than the limit.

        `heard_s`: when it told of one last; of time.monotonic. `num_requests`: 0 while it is to
        stand still.
        """
        now_s = time.monotonic()
        if not num_requests:
            self._idle_s = now_s
        elif now_s - max(self._idle_s, heard_s) > self._limit_s:
            raise EngineDied(
                f"vLLM's engine did no step for {self._limit_s:g} s, "
                f"with {num_requests} open requests"
            )
