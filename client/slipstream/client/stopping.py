"""The signals with which a user stops a command."""

from __future__ import annotations

import asyncio
import signal


async def stop_signal() -> signal.Signals:
    """Waits for the first SIGINT, SIGTERM or SIGHUP and returns it.

    The next SIGINT or SIGTERM has its usual effect. A further SIGHUP has none, since a terminal
    that closes and its shell both send one. A SIGHUP that is ignored, as behind nohup, stays so.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
        if not came.done():
            came.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, note, number)
    return await came
