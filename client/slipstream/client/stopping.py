"""The signals with which a user stops a command."""

from __future__ import annotations

import asyncio
import signal


async def stop_signal() -> signal.Signals:
    """Waits for the first SIGINT or SIGTERM and returns it; the next one has its usual effect."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
        if not came.done():
            came.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    return await came
