"""The trainer's heartbeat: rank 0 reports to the controller that work continues.

Consumes: notes of the training loop. Produces: calls to the controller. Waits for: the period.
Unblocked by: the clock, or the end of the context.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


@contextmanager
def signs_of_life(
    activity: Activity, tell: Callable[[], None], *, period_s: float
) -> Iterator[None]:
    """A context in which a thread calls `tell` every `period_s` seconds if `activity` has grown."""
    closed = threading.Event()

    def run() -> None:
        told_count = 0
        while not closed.wait(period_s):
            if activity.count != told_count:
                told_count = activity.count
                tell()

    threading.Thread(target=run, name="signs-of-life", daemon=True).start()
    try:
        yield
    finally:
        closed.set()
