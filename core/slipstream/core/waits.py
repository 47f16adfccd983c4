"""Waits that have a limit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

Message = TypeVar("Message")
# Seconds without a message after which a stream's other end is asked for it; a thousand servers may
# be silent while their episodes are long, and each asks for the whole status.
SILENT_S = 300.0


async def within(limit_s: float, wait: Awaitable[object]) -> bool:
    """Awaits `wait` for at most `limit_s`, then cancels it; returns whether it has ended."""
    try:
        async with asyncio.timeout(limit_s):
            await wait
    except TimeoutError:
        return False
    return True


async def asking_in_silence(
    read: Callable[[], Awaitable[Message]], ask: Callable[[], Awaitable[None]]
) -> AsyncIterator[Message]:
    """Yields what `read` returns, without end; `ask`, called after each `SILENT_S`, may raise.

    A proxy between the ends of a stream outlives one whose host is gone, and answers pings for it.
    """
    while True:
        reading = asyncio.ensure_future(read())
        try:
            while not (await asyncio.wait((reading,), timeout=SILENT_S))[0]:
                await ask()
            yield reading.result()
        finally:
            reading.cancel()
