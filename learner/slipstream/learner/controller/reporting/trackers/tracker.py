"""The interface of trackers, and the threads that hand a run's numbers to each.

Consumes: numbers of steps and rounds. Produces: calls of the trackers.
Waits for: the next numbers. Unblocked by: numbers, `close`. Only `close` waits for trackers, and
for a limited time.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from pydantic import JsonValue
from slipstream.core.settings.config import Config

# Settings that hold or locate secrets, which no tracking service should get.
_UNTOLD = (
    "queue.redis_url",
    "queue.redis_password_file",
    "queue.controller",
    "queue.rollout_server",
    "security",
)


# Takes a warning about a tracker; called on any thread.
Complain: TypeAlias = Callable[[str], None]
MAX_WAITING = 10_000
CLOSE_LIMIT_S = 60.0
log = logging.getLogger(__name__)
# The numbers of one step or version.
_Entry: TypeAlias = tuple[int, dict[str, float]]


class Tracker(Protocol):
    """Takes the numbers of one run; called from one thread, and may block.

    An error ends the tracker, never the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the finite numbers of one step or version."""
        ...

    def close(self) -> None:
        """Sends the numbers that are left."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for a tracking service.

    `run_id` is the service's own id of the run and stays the same when the run is resumed. It is
    empty when the service must draw one.
    """

    folder: Path
    project: str
    name: str
    run_id: str
    settings: Mapping[str, JsonValue]


def told_settings(config: Config) -> dict[str, JsonValue]:
    """All settings but secrets, by flat names like `algorithm.max_staleness`."""
    flat: dict[str, JsonValue] = {}

    def flatten(prefix: str, value: JsonValue) -> None:
        if prefix in _UNTOLD:
            return
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", config.model_dump(mode="json"))
    return flat


# Opens a tracker; raises the errors of the tracker's package.
OpenTracker: TypeAlias = Callable[[], Tracker]


class Trackers:
    """All trackers of a run. A failure ends only that tracker, with one warning."""

    def __init__(
        self,
        opened: Mapping[str, OpenTracker],
        complain: Complain,
        *,
        close_limit_s: float = CLOSE_LIMIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Opens each tracker in its own thread, so that a slow service delays nothing.

        A tracker for which more than `max_waiting` entries wait is abandoned.
        """
        self._close_limit_s = close_limit_s
        self._complain = complain
        self._writers = [
            _Writer(name, open_, complain, max_waiting) for name, open_ in opened.items()
        ]
        for writer in self._writers:
            writer.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Passes on the finite numbers of one step or version."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for writer in self._writers:
            writer.put((step, finite))

    def close(self) -> None:
        """Waits until all trackers have taken all numbers, at most `close_limit_s` in total."""
        until = time.monotonic() + self._close_limit_s
        for writer in self._writers:
            writer.put(None)
        for writer in self._writers:
            writer.join(max(0.0, until - time.monotonic()))
            if writer.is_alive():
                self._complain(
                    f"tracker {writer.name} was not done {self._close_limit_s:g} s after the run"
                )
        self._writers = []


class _Writer(threading.Thread):
    def __init__(self, name: str, open_: OpenTracker, complain: Complain, max_waiting: int) -> None:
        # A service that never answers must not keep the controller alive.
        super().__init__(name=name, daemon=True)
        self._open = open_
        self._complain = complain
        self._entries: queue.Queue[_Entry | None] = queue.Queue(max_waiting)
        self._ended = False

    def put(self, entry: _Entry | None) -> None:
        if self._ended:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._abandon(f"it is {self._entries.maxsize} entries behind")

    def run(self) -> None:
        try:
            tracker = self._open()
            while not self._ended:
                entry = self._entries.get()
                if entry is None:
                    break
                tracker.log(*entry)
            tracker.close()
        except Exception as error:
            log.exception("tracker %s", self.name)
            self._abandon(f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}")

    def _abandon(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._complain(f"tracker {self.name} gets no more numbers: {cause}")
