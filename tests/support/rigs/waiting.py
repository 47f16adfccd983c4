"""Waiting for what a test cannot await."""

import asyncio
import time
from collections.abc import Callable

# Other work may take the machine for half a minute.
LIMIT_S = 120.0
_POLL_S = 0.005


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Waits until `condition()` holds; TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(_POLL_S)


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Blocks the thread until `condition()` holds; TimeoutError after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"still not after {limit_s:g} s")
        time.sleep(_POLL_S)
