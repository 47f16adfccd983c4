"""A limit in bytes; callers wait for room in the order of their calls."""

import asyncio
from collections import deque

from slipstream.core.errors import QueueError, TrajectoryQueueFull


class ByteBudget:
    """Counts bytes in use; `acquire` waits for room, `release` makes room."""

    def __init__(self, max_bytes: int) -> None:
        """Limits the bytes in use to `max_bytes`."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int, *, timeout_s: float | None) -> None:
        """Takes `num_bytes`.

        Raises TrajectoryQueueFull after `timeout_s`; None waits without a limit.

        Raises QueueError when `num_bytes` can never fit.
        """
        check_fits(num_bytes, self.max_bytes)
        if not self._waiting and self.used_bytes + num_bytes <= self.max_bytes:
            self.used_bytes += num_bytes
            return
        place = (num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place[1]
        except TimeoutError:
            assert timeout_s is not None
            if not _granted(place[1]):
                raise queue_full(num_bytes, timeout_s, self.used_bytes, self.max_bytes) from None
        except asyncio.CancelledError:
            if _granted(place[1]):
                self.release(num_bytes)
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
                self._grant()

    def release(self, num_bytes: int) -> None:
        """Gives `num_bytes` back and wakes the callers that now have room."""
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self.max_bytes:
            num_bytes, granted = self._waiting.popleft()
            if granted.done():
                continue
            self.used_bytes += num_bytes
            granted.set_result(None)


def check_fits(num_bytes: int, max_bytes: int) -> None:
    """Raises QueueError when a trajectory is larger than the whole queue."""
    if num_bytes > max_bytes:
        raise QueueError(
            f"a trajectory of {num_bytes} bytes does not fit queue.max_bytes = {max_bytes}"
        )


def queue_full(
    num_bytes: int, timeout_s: float, used_bytes: int, max_bytes: int
) -> TrajectoryQueueFull:
    """Returns the error of a `put` that waited too long."""
    return TrajectoryQueueFull(
        f"no room for {num_bytes} bytes within {timeout_s:g} s: {used_bytes} of {max_bytes} bytes "
        "wait for the controller"
    )


def _granted(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled()
