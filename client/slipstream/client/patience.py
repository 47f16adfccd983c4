"""Limits how long a client waits for a controller that it has lost.

Waits for: a pause between two attempts. Unblocked by: the clock.
"""

from __future__ import annotations

import asyncio
import logging

from slipstream.core.backoff import Backoff

# Seconds in which a lost controller may come back.
RECONNECT_TIMEOUT_S = 120.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0

logger = logging.getLogger(__name__)


class Patience:
    """Waits between attempts to reach a lost controller, longer each time, up to a limit."""

    def __init__(self, limit_s: float = RECONNECT_TIMEOUT_S) -> None:
        """A lost controller has `limit_s` to come back."""
        self.served = False
        self._limit_s = limit_s
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._lost_at_s: float | None = None

    def succeeded(self) -> None:
        """Notes that the controller answered."""
        self.served = True
        self._backoff.reset()
        self._lost_at_s = None

    async def wait(self, cause: str) -> bool:
        """Waits before the next attempt; returns False when the time for attempts is over."""
        now_s = asyncio.get_running_loop().time()
        self._lost_at_s = self._lost_at_s or now_s
        if now_s + self._backoff.next_s > self._lost_at_s + self._limit_s:
            return False
        logger.warning("lost the controller (%s); retrying in %.1f s", cause, self._backoff.next_s)
        await asyncio.sleep(self._backoff.take_s())
        return True
