"""The settings of the choice of tasks by their recent rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator
from slipstream.core.settings.section import Positive, Reference, Section

# The newest groups of a task whose rewards the journal's reader keeps.
MAX_WINDOW = 16
# Settings that only one rule reads.
_READ_BY = {"every_rounds": "skip", "floor": "sample", "chooser": "own", "args": "own"}


class CurriculumSection(Section):
    """The choice of an environment's next task by the mean rewards of the task's newest groups.

    Without this table each task comes once, in a seeded order, and then again. The controller
    journals each reward that the choice reads, so a run that goes on chooses as it would have.
    """

    # skip: tasks come in their order, and a task is passed over while its newest `window` groups
    # were all solved or all failed; sample: tasks are drawn in proportion to 4 p (1 - p), where p
    # is the mean success of the newest groups, and a task without any counts as 1; own: the class
    # `chooser` names each next task.
    rule: Literal["skip", "sample", "own"]
    # Number of newest groups of a task that count.
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = 2
    # A group whose mean reward is this or less has failed: its success is 0.
    failed_reward: float = 0.0
    # A group whose mean reward is this or more is solved: its success is 1.
    solved_reward: float = 1.0
    # With skip: in each round of the tasks whose number is a multiple of this no task is passed
    # over, since the model has changed. 1: none ever is.
    every_rounds: Positive = 4
    # With sample: smallest value in place of 4 p (1 - p).
    floor: float = Field(0.05, ge=0.01, le=1)
    # With own: the class, package.module:Class, from the working directory or Python's path.
    chooser: Reference | None = None
    # With own: keyword arguments of the class.
    args: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumSection:
        if not self.failed_reward < self.solved_reward:
            raise ValueError(
                f"failed_reward must be below solved_reward, got {self.failed_reward} and "
                f"{self.solved_reward}"
            )
        if self.rule == "own" and self.chooser is None:
            raise ValueError("rule = 'own' needs chooser, a class as package.module:Class")
        for name, rule in _READ_BY.items():
            default = type(self).model_fields[name].default
            # A run writes defaults into its resolved settings, and reads them again.
            if getattr(self, name) != default and self.rule != rule:
                raise ValueError(f"{name} has no effect with rule = {self.rule!r}")
        return self

    def success(self, reward: float) -> float:
        """The success of a group with this mean reward, from 0 to 1."""
        share = (reward - self.failed_reward) / (self.solved_reward - self.failed_reward)
        return min(max(share, 0.0), 1.0)
