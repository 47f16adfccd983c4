"""The ends of trajectories."""

from __future__ import annotations

from enum import Enum


class End(Enum):
    """The last thing that happens to a trajectory."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    EVALUATED = "evaluated"
    # The trajectory was in a batch that the trainer could not train.
    SET_ASIDE = "set_aside"
