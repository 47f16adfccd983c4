"""The view of an environment's tasks from which a user's class chooses the next one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class TaskView:
    """What a choice may depend on: it is the same when a run goes on and chooses again.

    `num_tasks` tasks have the indices from 0 on. `number` counts the environment's choices from 0.
    `random` is seeded by the run's seed, the environment's name and `number`.
    """

    def __init__(
        self,
        num_tasks: int,
        number: int,
        seed: str,
        *,
        tried: Sequence[int] = (),
        rewards: Callable[[int], list[float]] = lambda _: [],
    ) -> None:
        """`tried` are the tasks with a result; `rewards` returns those of a task."""
        self.num_tasks = num_tasks
        self.number = number
        self.random = random.Random(f"{seed}/own/{number}")
        self._tried, self._rewards = tried, rewards

    @property
    def tried(self) -> list[int]:
        """The tasks with a result, in the order of their first results."""
        return list(self._tried)

    def rewards(self, task_index: int) -> list[float]:
        """Returns the mean rewards of at most 16 newest groups of a task, oldest first."""
        return self._rewards(task_index)
