"""An event log that clients can follow, and a signal that the state has changed."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

from slipstream.protocol.bounds import one_line
from slipstream.v1 import status_pb2

MAX_EVENTS = 10_000
# Number of newest events that keep their metrics; metrics.jsonl has all metrics.
MAX_METRICS = 100
MAX_CHARACTERS = 16_384
# Largest size of all kept events together; 10,000 ordinary events take a tenth of it.
MAX_BYTES = 16 << 20
# Changes within this time wake a task once.
GATHER_S = 0.005

log = logging.getLogger(__name__)


class Signal:
    """A signal that wakes all tasks that wait for the state to change.

    A wait ends at `notify` or at its time limit. The task checks its condition again after each
    wait.
    """

    def __init__(self) -> None:
        # The waiters, by the seconds for which they gather changes after a notice.
        self._waiting: dict[float, dict[asyncio.Future[None], None]] = {}

    def notify(self, *, gathered: bool = False) -> None:
        """Wakes all waiting tasks; a change that is one of many, `gathered`, those that gather."""
        waiting = self._waiting
        self._waiting = {}
        for gather_s, waiters in waiting.items():
            if gathered and not gather_s:
                self._waiting[gather_s] = waiters
            elif gather_s and waiters:
                asyncio.get_running_loop().call_later(gather_s, _wake, waiters)
            else:
                _wake(waiters)

    async def changes(self, timeout_s: float, *, gather_s: float = GATHER_S) -> None:
        """Waits for `notify` and then `gather_s` more seconds, or until `timeout_s` has passed.

        The additional seconds gather further changes: every trajectory is a change, and to wake a
        task for each would cost more than the task's check.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        waiters = self._waiting.setdefault(gather_s, {})
        waiters[waiter] = None
        # Cheaper than `asyncio.timeout` and an event: several tasks wait after each trajectory.
        timer = loop.call_later(timeout_s, _wake, (waiter,))
        try:
            await waiter
        finally:
            timer.cancel()
            waiters.pop(waiter, None)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class EventLog:
    """The newest 10,000 events, numbered; the newest 100 events with metrics keep their metrics.

    Events are kept as encoded bytes, at most 16 MiB in all: a decoded message takes seven times
    the memory.
    """

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._count = 0
        # The metrics of the newest events that have some, by the event's number.
        self._metrics: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MAX_METRICS)
        self._signal = Signal()
        self.closed = False

    def add(
        self,
        text: str,
        level: int = logging.INFO,
        *,
        step: int = 0,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Adds an event of one line and wakes the followers; `step` 0 means no step.

        `level` is INFO, WARNING or ERROR of `logging`. Servers and environments may have written
        parts of `text`, so control characters are escaped, and the text is cut after 16,384
        characters.
        """
        text = one_line(text, MAX_CHARACTERS)
        log.log(level, text, extra={"step": step or None})
        severity = f"SEVERITY_{logging.getLevelName(level)}"
        if metrics:
            self._metrics.append((self._count + 1, metrics))
        self._append(status_pb2.Event(severity=severity, text=text, step=step))

    def warn(self, text: str) -> None:
        """Adds a warning, like `add`."""
        self.add(text, logging.WARNING)

    def close(self, final_state: int, text: str) -> None:
        """Adds the last event, which names the run's final state and ends `follow`."""
        self.closed = True
        state = status_pb2.RunState.Name(final_state)
        severity = status_pb2.SEVERITY_INFO
        self._append(status_pb2.Event(severity=severity, text=text, final_state=state))

    def kept(self, after: int = 0) -> Iterator[status_pb2.Event]:
        """Yields the events that are kept now and have a number above `after`, oldest first."""
        first = max(0, min(after, self._count) - (self._count - len(self._events)))
        metrics = dict(self._metrics)
        for data in list(itertools.islice(self._events, first, None)):
            event = status_pb2.Event.FromString(data)
            event.metrics.update(metrics.get(event.number, {}))
            yield event

    async def follow(self, after: int) -> AsyncIterator[status_pb2.Event]:
        """Yields events numbered above `after`, then new ones, to the last, which `close` adds."""
        while True:
            for event in self.kept(after):
                after = event.number
                yield event
            if self.closed and after >= self._count:
                return
            await self._signal.changes(5.0, gather_s=0.0)

    def _append(self, event: status_pb2.Event) -> None:
        self._count += 1
        event.number, event.unix_time_s = self._count, time.time()
        self._events.append(event.SerializeToString())
        self._num_bytes += len(self._events[-1])
        while len(self._events) > MAX_EVENTS or self._num_bytes > MAX_BYTES:
            self._num_bytes -= len(self._events.popleft())
        self._signal.notify()
