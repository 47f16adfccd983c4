"""The pace of leases: limits leased, untrained groups below the staleness bound.

A group that is leased too early waits, complete, for its step, and its tokens grow old. A group
that is leased too late keeps the trainer waiting. Pure state: the caller passes all times, in
seconds of the same clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Number of batches whose slowest group counts: a batch needs all of its groups.
REMEMBERED_BATCHES = 3
REMEMBERED_STEPS = 8
# Shortest wait of the trainer that counts, as a share of its step.
NOTABLE_WAIT = 0.05
# Shortest time between two looks, however short steps are.
SOONEST_RECHECK_S = 0.02
# Steps without a notable wait after which one batch less is tried.
CALM_STEPS = 20


class JustInTime:
    """The least number of groups that keeps the trainer busy, from times of groups and steps.

    While the trainer works on a batch, servers generate the groups of the next batch. A group that
    takes longer than a step must be leased a step earlier, and so on. With `ceil(group / step)`
    batches in flight, every group has as much time as the slowest recent group took. If groups are
    filtered or fail, that is too few: each step for which the trainer waits adds a batch. The limit
    is never below one batch; the lease book keeps the staleness bound.

    pace.trainer_asks(10.0)  # the trainer has nothing to do since 10.0
    pace.batch_given(12.0)   # it waited 2 s; its step lasts until it asks again
    pace.group_done(3.5)     # a group took 3.5 s
    pace.limit(13.0)         # groups that may be leased and untrained; None: no limit yet
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_extra = max_staleness
        self._group_s: deque[float] = deque(maxlen=REMEMBERED_BATCHES * groups_per_step)
        self._step_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        # Number of batches in flight beyond `ceil(group / step)`.
        self._extra = 0
        self._calm_steps = 0
        # Time at which the trainer got its batch; None: it has none.
        self._given_s: float | None = None
        # Time since which the trainer waits for a batch; None: it does not wait.
        self._asked_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Median seconds from a batch given to the trainer's next request; None: not known yet."""
        return statistics.median(self._step_s) if self._step_s else None

    def group_done(self, group_s: float) -> None:
        """Notes that a group took `group_s` seconds from its lease to its last episode."""
        self._group_s.append(group_s)

    def trainer_asks(self, now_s: float) -> None:
        """Notes that the trainer would take a batch now; the first of several calls counts."""
        if self._given_s is not None:
            self._step_s.append(now_s - self._given_s)
            self._given_s = None
        if self._asked_s is None:
            self._asked_s = now_s

    def batch_given(self, now_s: float) -> None:
        """Notes that the trainer has got a batch."""
        self._note_wait(self._waited_s(now_s))
        self._given_s, self._asked_s = now_s, None

    def trainer_lost(self) -> None:
        """Forgets the present step, because the trainer starts again."""
        self._given_s = self._asked_s = None

    def limit(self, now_s: float) -> int | None:
        """Largest number of leased, untrained groups; None: only the staleness bound limits them.

        While the trainer waits, each further `step_s` adds a batch at once, so that no run stalls.
        """
        step_s = self.step_s
        if step_s is None or len(self._group_s) < self._groups_per_step:
            return None
        step_s = max(step_s, 1e-6)
        batches = math.ceil(max(self._group_s) / step_s) + self._extra
        batches += math.ceil(self._waited_s(now_s) / step_s)
        return max(batches, 1) * self._groups_per_step

    def recheck_s(self) -> float | None:
        """Seconds until the limit may have grown by time alone; None: it does not grow."""
        if self._asked_s is None or self.step_s is None:
            return None
        return max(self.step_s / 4, SOONEST_RECHECK_S)

    def _waited_s(self, now_s: float) -> float:
        return 0.0 if self._asked_s is None else now_s - self._asked_s

    def _note_wait(self, waited_s: float) -> None:
        step_s = self.step_s
        if step_s is None:
            return
        if waited_s > NOTABLE_WAIT * step_s:
            self._extra = min(self._extra + 1, self._max_extra)
            self._calm_steps = 0
            return
        self._calm_steps += 1
        if self._calm_steps >= CALM_STEPS:
            self._extra = max(self._extra - 1, 0)
            self._calm_steps = 0
