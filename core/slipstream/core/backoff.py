"""Pauses between attempts, each twice as long as the one before, up to a limit."""


class Backoff:
    """Gives the pause before the next attempt; the caller sleeps."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.next_s = first_s

    @property
    def is_fresh(self) -> bool:
        return self.next_s == self._first_s

    def take_s(self) -> float:
        """Returns the pause in seconds, and doubles the next pause, up to the limit."""
        pause_s = self.next_s
        self.next_s = min(2 * self.next_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        """Makes the next pause the first, shortest one."""
        self.next_s = self._first_s
