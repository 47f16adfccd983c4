"""Waits that have a limit."""

import asyncio
from collections.abc import Awaitable


async def within(limit_s: float, wait: Awaitable[object]) -> bool:
    """Awaits `wait` for at most `limit_s`, then cancels it; returns whether it has ended."""
    try:
        async with asyncio.timeout(limit_s):
            await wait
    except TimeoutError:
        return False
    return True
