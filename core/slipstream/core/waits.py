"""Waits that have a limit."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

Message = TypeVar("Message")
# Seconds without a message after which a stream's other end is asked for it; a thousand servers may
# be silent while their episodes are long, and each asks for the whole status.
SILENT_S = 300.0
# Seconds between two looks at the clock during a wait, and those by which a look is called late.
LOOK_S = 1.0
LATE_S = 1.0


async def within(limit_s: float, wait: Awaitable[object]) -> bool:
    """Awaits `wait` for at most `limit_s`, then cancels it; returns whether it has ended.

    Seconds in which this process stood still do not count.
    """
    try:
        async with awake_timeout(limit_s):
            await wait
    except TimeoutError:
        return False
    return True


@contextlib.asynccontextmanager
async def awake_timeout(limit_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `limit_s`, like `asyncio.timeout`, while the event loop runs.

    A process that was stopped, or whose machine slept, finds its deadlines passed when it goes on.
    For a look that is late by more than a second, the deadline is later by as much.
    """
    async with asyncio.timeout(limit_s) as timeout:
        looks = _Looks(timeout, min(LOOK_S, limit_s / 4))
        try:
            yield
        finally:
            looks.cancel()


class _Looks:
    """Looks at the loop's clock again and again; the deadline of `timeout` moves by what is late.

    A look comes before a deadline that has passed meanwhile, because it was due earlier.
    """

    def __init__(self, timeout: asyncio.Timeout, period_s: float) -> None:
        self._timeout = timeout
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._plan()

    def cancel(self) -> None:
        self._next.cancel()

    def _plan(self) -> None:
        due_s = self._loop.time() + self._period_s
        self._next = self._loop.call_at(due_s, self._look, due_s)

    def _look(self, due_s: float) -> None:
        if self._timeout.expired():
            # A wait that is cancelled may take long to end; its deadline cannot move any more.
            return
        late_s = self._loop.time() - due_s
        deadline_s = self._timeout.when()
        if late_s > LATE_S and deadline_s is not None:
            self._timeout.reschedule(deadline_s + late_s)
        self._plan()


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
