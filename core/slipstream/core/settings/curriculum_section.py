"""The settings of the choice of tasks by their recent rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from slipstream.core.settings.section import Section

# The newest groups of a task whose rewards the journal's reader keeps.
MAX_WINDOW = 16


class CurriculumSection(Section):
    """The choice of an environment's next task by the mean rewards of the task's newest groups.

    Tasks are drawn in proportion to 4 p (1 - p), where p is the mean success of the task's newest
    groups; a task without a result counts as 1. Success runs from 0 at `failed_reward` to 1 at
    `solved_reward` of the environment's algorithm.dynamic_sampling.

    Without this table each task comes once, in a seeded order, and then again. The controller
    journals each reward that the choice reads, so a run that goes on chooses as it would have.
    """

    # Number of newest groups of a task that count.
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = 2
    # A group whose mean reward is this or less has failed: its success is 0.
    failed_reward: float = 0.0
    # Smallest value in place of 4 p (1 - p).
    floor: float = Field(0.05, ge=0.01, le=1)
