"""Decides when leases wait for the version that is being made: pure state, the caller passes times.

A group that starts while the trainer makes a version is bound by the older version, and so has a
step less for its longest reply. With a small `max_staleness` that is much. If the trainer waits for
long replies anyway, and servers stand empty since the bound allows no more groups, waiting for the
next version costs little and gives every group that step.
"""

from __future__ import annotations

from collections import deque

REMEMBERED_STEPS = 8
# Steps that are measured before leases may wait.
FIRST_STEPS = 4
# Least share of the time that the trainer waits, for each version of the bound. In simulations of
# fleets of many speeds (benchmarks/results/schedules.md) waiting gains above it, and may lose below it.
LEAST_WAIT = 0.3
# Largest share of the servers' places that are taken while leases wait.
MOST_TAKEN = 0.5


class Freshness:
    """Measures the trainer's waits; says whether new leases wait for the next version.

    freshness.trainer_asks(10.0)  # the trainer has nothing to do since 10.0
    freshness.batch_given(12.0)   # it waited 2 s, and now makes a version until it asks again
    freshness.waits(max_staleness=1, taken=40, places=256)
    """

    def __init__(self) -> None:
        # Seconds that the trainer waited for each batch, and that it then worked.
        self._steps: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_STEPS)
        self._waited_s = 0.0
        # Time at which the trainer got its batch; None: it has none.
        self._given_s: float | None = None
        # Time since which the trainer waits for a batch; None: it does not wait.
        self._asked_s: float | None = None

    def trainer_asks(self, now_s: float) -> None:
        """Notes that the trainer would take a batch now; the first of several calls counts."""
        if self._given_s is not None:
            self._steps.append((self._waited_s, now_s - self._given_s))
            self._given_s = None
        if self._asked_s is None:
            self._asked_s = now_s

    def batch_given(self, now_s: float) -> None:
        """Notes that the trainer has got a batch."""
        if self._asked_s is not None:
            self._waited_s = now_s - self._asked_s
        self._given_s, self._asked_s = now_s, None

    def trainer_lost(self) -> None:
        """Forgets the present step, because the trainer starts again."""
        self._given_s = self._asked_s = None

    @property
    def waiting_share(self) -> float:
        """Share of the recent time in which the trainer waited; 0 while too little is known."""
        if len(self._steps) < FIRST_STEPS:
            return 0.0
        waited_s = sum(waited for waited, _ in self._steps)
        return waited_s / max(waited_s + sum(worked for _, worked in self._steps), 1e-9)

    def waits(self, *, max_staleness: int, taken: int, places: int) -> bool:
        """Whether a lease waits now; `taken` of the serving servers' `places` have an episode.

        Only while the trainer has a batch, so that a wait ends with the step.
        """
        return (
            self._given_s is not None
            and max_staleness > 0
            and taken <= MOST_TAKEN * places
            and self.waiting_share >= LEAST_WAIT * max_staleness
        )
