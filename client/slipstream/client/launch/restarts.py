"""The rule by which a command restarts a program that died: pure state, no clock."""

from __future__ import annotations

from slipstream.core.exit_codes import FINAL_ERROR, NOT_STARTED, USAGE_ERROR

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
# A restart after one of these would fail in the same way.
FINAL_CODES = (USAGE_ERROR, FINAL_ERROR)
# Starts in a row that may fail before the program has begun to work.
MAX_FAILED_STARTS = 2


class RestartPolicy:
    """Counts the deaths of one program, and says how long to wait before it is started again.

    policy = RestartPolicy(max_restarts=5)
    while (pause_s := policy.pause_after(exit_code)) is not None:
        ...  # sleep for pause_s, start the program; `forgive` when it got on with its work
    """

    def __init__(self, max_restarts: int, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Allows `max_restarts` restarts between two calls of `forgive`."""
        self._max_restarts, self._first_pause_s = max_restarts, first_pause_s
        # The number of the restart that is due, or was made last.
        self.restarts = 0
        self._failed_starts = 0

    def forgive(self) -> None:
        """Counts restarts from 0 again: the program worked for long, or made progress."""
        self.restarts = 0

    def pause_after(self, exit_code: int | None) -> float | None:
        """Returns the seconds to wait before the next start, or None if there is to be none."""
        self.restarts += 1
        self._failed_starts = self._failed_starts + 1 if exit_code == NOT_STARTED else 0
        is_final = exit_code in FINAL_CODES
        is_final |= self._failed_starts == MAX_FAILED_STARTS
        if is_final or self.restarts > self._max_restarts:
            return None
        return min(self._first_pause_s * 2.0 ** (self.restarts - 1), MAX_PAUSE_S)
