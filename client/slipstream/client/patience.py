"""How long a client waits for a controller that it has lost.

Waits for: a pause between two attempts. Unblocked by: the clock.
"""

from __future__ import annotations

import asyncio
import logging

# A lost controller may take so long to come back.
RECONNECT_TIMEOUT_S = 120.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0

logger = logging.getLogger(__name__)


class Patience:
    """How long a lost controller is waited for."""

    def __init__(self) -> None:
        self.served = False
        self._backoff_s = FIRST_BACKOFF_S
        self._lost_at_s: float | None = None

    def succeeded(self) -> None:
        """The controller answered."""
        self.served = True
        self._backoff_s = FIRST_BACKOFF_S
        self._lost_at_s = None

    async def wait(self, cause: str) -> bool:
        """Waits before the next attempt; False when there were enough."""
        now_s = asyncio.get_running_loop().time()
        self._lost_at_s = self._lost_at_s or now_s
        if now_s + self._backoff_s > self._lost_at_s + RECONNECT_TIMEOUT_S:
            return False
        logger.warning("the controller was lost (%s); again in %.1f s", cause, self._backoff_s)
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        return True
