"""The choice of tasks by their recent rewards.

Each choice is a function of the run's seed, the number of the choice and the results before it. The
module uses no clock and no I/O.
"""

import random
from collections import Counter
from enum import Enum

from slipstream.core.settings.sections import CurriculumSection
from slipstream.core.types import GroupId
from slipstream.learner.controller.records.history import WINDOW, TaskResults

# Smallest probability with which a drawn task is accepted.
_FLOOR = 0.05


class Standing(Enum):
    """The state of a task according to the rewards of its newest groups."""

    UNSEEN = "unseen"
    LEARNING = "learning"
    SOLVED = "solved"
    FAILED = "failed"


class Curriculum:
    """The results of one environment's tasks, and the random choice of a task by these results.

    curriculum.note(group_id, 7, 1.0)  # a group of task 7 had the mean reward 1
    curriculum.draw(100, number)       # one of 100 tasks
    """

    def __init__(
        self, settings: CurriculumSection, solved_reward: float, seed: str, results: TaskResults
    ) -> None:
        """Starts with `results`, which may be restored; `note` updates them.

        `solved_reward` is the mean reward of a solved group. `seed` seeds all draws.
        """
        self._settings, self._solved_reward = settings, solved_reward
        self._seed, self._results = seed, results
        self._standings = Counter(self._standing(task) for task in results.tasks())
        # Number of rejected draws.
        self._passed_over = 0
        # Successes of the tasks chosen since the last metrics; tasks without a result are left out.
        self._chosen: list[float] = []

    def note(self, group_id: GroupId, task_index: int, reward: float) -> None:
        """Adds the mean reward of a group of the task `task_index`."""
        before = self._standing(task_index)
        self._results.note(group_id, task_index, reward)
        self._standings[before] -= before is not Standing.UNSEEN
        self._standings[self._standing(task_index)] += 1

    def draw(self, num_tasks: int, number: int) -> int:
        """Draws one of `num_tasks` tasks by rejection sampling; prefers tasks of medium success.

        Success is a task's mean reward, scaled from 0 (failed) to 1 (solved). A task is accepted
        with probability 4 * success * (1 - success), but at least `_FLOOR`; a task without a result
        is always accepted. So no sum over all tasks is needed, and the draw is short for any number
        of tasks. `number` is the number of the choice, which seeds the draw.
        """
        source = random.Random(f"{self._seed}/draw/{number}")
        while True:
            task_index = source.randrange(num_tasks)
            success = self._mean_success(task_index)
            worth = 1.0 if success is None else 4 * success * (1 - success)
            if source.random() < max(worth, _FLOOR):
                return task_index
            self._passed_over += 1

    def chosen(self, task_index: int) -> None:
        """Notes that a task was chosen; the metrics include its success."""
        success = self._mean_success(task_index)
        if success is not None:
            self._chosen.append(success)

    def metrics(self) -> dict[str, float]:
        """Returns how many tasks are learning, solved and failed, and how many draws were rejected.

        If any task chosen since the last call has a result, the mean success of these tasks is
        included.
        """
        chosen, self._chosen = self._chosen, []
        found = {f"tasks_{each.value}": float(self._standings[each]) for each in _SEEN}
        found["tasks_passed_over"] = float(self._passed_over)
        if chosen:
            found["chosen_success"] = sum(chosen) / len(chosen)
        return found

    def _mean_success(self, task_index: int) -> float | None:
        successes = self._successes(task_index)
        return sum(successes) / len(successes) if successes else None

    def _successes(self, task_index: int) -> list[float]:
        """Returns the mean rewards of the task's newest groups, scaled to 0 (failed) .. 1."""
        failed, solved = self._settings.failed_reward, self._solved_reward
        rewards = self._results.newest(task_index)
        return [min(max((reward - failed) / (solved - failed), 0.0), 1.0) for reward in rewards]

    def _standing(self, task_index: int) -> Standing:
        successes = self._successes(task_index)
        if not successes:
            return Standing.UNSEEN
        if len(successes) < WINDOW or set(successes) not in ({0.0}, {1.0}):
            return Standing.LEARNING
        return Standing.SOLVED if successes[0] else Standing.FAILED


_SEEN = (Standing.LEARNING, Standing.SOLVED, Standing.FAILED)
