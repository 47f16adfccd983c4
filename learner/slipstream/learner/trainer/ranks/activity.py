"""The trainer's heartbeat: rank 0 reports to the controller that work continues.

Consumes: notes of the training loop. Produces: calls to the controller. Waits for: the period.
Unblocked by: the clock, or the end of the context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Activity:
    """Counts pieces of a rank's work: micro batches, bytes of files, tensors.

    The working thread calls `note` after each piece. If a collective or a device hangs, the count
    stops: a growing count proves that work continues, not only that the process exists.
    """

    def __init__(self) -> None:
        self.count = 0
        # Bytes of the tensors that were read from the model's folder.
        self.loaded_bytes = 0

    def note(self) -> None:
        """Counts one more piece of work."""
        self.count += 1

    def loaded(self, num_bytes: int) -> None:
        """Counts a tensor of `num_bytes` bytes that was read."""
        self.loaded_bytes += num_bytes
        self.note()


class SignsOfLife:
    """A context in which a thread calls `tell` every `period_s` seconds if `activity` has grown."""

    def __init__(self, activity: Activity, tell: Callable[[], None], *, period_s: float) -> None:
        self._activity, self._tell, self._period_s = activity, tell, period_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs-of-life", daemon=True)

    def __enter__(self) -> SignsOfLife:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread's calls without waiting: a call that has begun may still run."""
        self._closed.set()

    def _run(self) -> None:
        told = 0
        while not self._closed.wait(self._period_s):
            count = self._activity.count
            if count != told:
                told = count
                self._tell()
