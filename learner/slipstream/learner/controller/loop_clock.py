"""The controller's clock, which leaves out stalls of the event loop, and a stopwatch."""

import asyncio
import math
import time
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stopwatch:
    """A stopwatch that adds up the seconds in which it runs."""

    def __init__(self) -> None:
        self._running_since_s: float | None = None
        self._total_s = 0.0

    def note(self, now_s: float, *, running: bool) -> None:
        """Starts or stops the stopwatch at `now_s`."""
        self._total_s = self.total_s(now_s)
        self._running_since_s = now_s if running else None

    def reset(self, now_s: float) -> None:
        """Sets the total to 0; the stopwatch keeps running if it ran."""
        self._total_s = 0.0
        if self._running_since_s is not None:
            self._running_since_s = now_s

    def total_s(self, now_s: float) -> float:
        """Returns the seconds in which the stopwatch has run until `now_s`."""
        since_s = self._running_since_s
        return self._total_s + (0.0 if since_s is None else now_s - since_s)


class LoopClock:
    """A clock that runs like `time.monotonic`, but not while the event loop is stalled.

    A task of the loop calls `look` periodically and passes the time of its next call. While that
    call is overdue the clock stays at the time when it was due. Without calls of `look` the clock
    is `time.monotonic`.

        clock.look(10.0, next_s=10.5)
        clock.at(10.2)  # 10.2
        clock.at(19.0)  # 10.5: the loop has not run since
        clock.look(19.0, next_s=19.5)
        clock.at(19.1)  # 10.6
    """

    def __init__(self) -> None:
        self._due_s = math.inf
        self._missed_s = 0.0

    def at(self, now_s: float) -> float:
        """Returns the time of this clock when `time.monotonic` is `now_s`."""
        return min(now_s, self._due_s) - self._missed_s

    def look(self, now_s: float, next_s: float) -> None:
        """Notes that the loop runs at `now_s`; the next call is due by `next_s`."""
        self._missed_s += max(0.0, now_s - self._due_s)
        self._due_s = next_s

    def now_s(self) -> float:
        """Returns the present time of this clock."""
        return self.at(time.monotonic())

    async def within(self, limit_s: float, coming: Awaitable[Result]) -> Result:
        """Returns the result of `coming`; raises TimeoutError after `limit_s` of this clock.

        `coming` is cancelled if it has not ended by then.
        """
        future = asyncio.ensure_future(coming)
        try:
            await self.wait([future], limit_s)
            if not future.done():
                raise TimeoutError
            return future.result()
        finally:
            future.cancel()

    async def wait(self, futures: Collection[asyncio.Future[Any]], limit_s: float) -> None:
        """Waits until all futures are done or `limit_s` seconds of this clock have passed."""
        until_s = self.now_s() + limit_s
        pending = {future for future in futures if not future.done()}
        while pending and (left_s := until_s - self.now_s()) > 0:
            _, pending = await asyncio.wait(pending, timeout=left_s)
