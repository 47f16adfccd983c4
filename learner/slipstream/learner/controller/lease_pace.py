"""How many groups may be leased and untrained at one time, below what the staleness promise allows.

A group that is leased early waits, complete, for its step, and its tokens grow old. One that is
leased late keeps the trainer waiting. Pure state: times come from the caller, in seconds of any one
clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Of so many steps' groups the slowest one counts: a batch needs all of its groups.
REMEMBERED_BATCHES = 3
REMEMBERED_STEPS = 8
# A wait of the trainer that counts, as a share of its step.
NOTABLE_WAIT = 0.05
# However short steps are.
SOONEST_RECHECK_S = 0.02
# Steps without one after which a batch less is tried.
CALM_STEPS = 20


class JustInTime:
    """As few groups as keep the trainer busy, from what groups and steps took lately.

    While the trainer works on one batch the groups of the next one are generated. If one of them
    takes longer than the step, it must have been leased a step earlier, and so on: with
    `ceil(group / step)` batches in flight every group has the time that the slowest one took. Where
    that is too few, because groups are filtered or fail, the trainer waits, and each such step adds
    a batch. Never less than one batch; the promise is kept by others.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_extra = max_staleness
        self._group_s: deque[float] = deque(maxlen=REMEMBERED_BATCHES * groups_per_step)
        self._step_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        # Batches beyond those that the times ask for.
        self._extra = 0
        self._calm_steps = 0
        # When the trainer was given its batch; None: it has none.
        self._given_s: float | None = None
        # Since when it waits for one; None: it does not.
        self._asked_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """How long the trainer is away with a batch; None: not known yet."""
        return statistics.median(self._step_s) if self._step_s else None

    def group_done(self, group_s: float) -> None:
        """A group took so long from its lease to its last episode."""
        self._group_s.append(group_s)

    def trainer_asks(self, now_s: float) -> None:
        """The trainer would take a batch now; the first of several calls counts."""
        if self._given_s is not None:
            self._step_s.append(now_s - self._given_s)
            self._given_s = None
        if self._asked_s is None:
            self._asked_s = now_s

    def batch_given(self, now_s: float) -> None:
        """The trainer has a batch."""
        self._note_wait(self._waited_s(now_s))
        self._given_s, self._asked_s = now_s, None

    def trainer_lost(self) -> None:
        """The trainer starts again: the step that it was in says nothing."""
        self._given_s = self._asked_s = None

    def limit(self, now_s: float) -> int | None:
        """How many groups may be leased and untrained; None: as many as the promise allows.

        Each step's time that the trainer waits makes room for one more batch at once: nothing can
        stall.
        """
        step_s = self.step_s
        if step_s is None or len(self._group_s) < self._groups_per_step:
            return None
        step_s = max(step_s, 1e-6)
        batches = math.ceil(max(self._group_s) / step_s) + self._extra
        batches += math.ceil(self._waited_s(now_s) / step_s)
        return max(batches, 1) * self._groups_per_step

    def recheck_s(self) -> float | None:
        """How soon the limit grows by time alone; None: it does not."""
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
