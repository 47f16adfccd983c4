"""How long to go on trying, in a process that may itself stand still meanwhile."""

import time


class Patience:
    """A number of seconds for which attempts are repeated.

    An attempt takes no more of them than its own limit. What lasts longer ran in a process that
    stood still: stopped by a signal, in a frozen cgroup, on a machine that slept. The deadlines of
    such a process have passed when it goes on, although nobody on the other side was slow.

        patience = Patience(600.0)
        patience.begin(30.0)
        # The process is stopped for an hour in a call that has a limit of 30 seconds.
        patience.is_over  # False: 570 seconds are left
    """

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self._began_s = time.monotonic()
        self._most_s = 0.0

    def begin(self, most_s: float) -> None:
        """Begins an attempt that takes at most `most_s` seconds, with the pause after it."""
        self._left_s = self.left_s
        self._began_s = time.monotonic()
        self._most_s = most_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, negative when the last attempt took more."""
        return self._left_s - min(time.monotonic() - self._began_s, self._most_s)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0
