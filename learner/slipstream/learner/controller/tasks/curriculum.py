"""The choice of tasks by their recent rewards: pure, no clock and no I/O of its own.

Each choice is a function of the run's seed, the number of the choice and the results before it.
"""

from __future__ import annotations

import random
from collections import Counter
from enum import Enum

from slipstream.core.settings.curriculum_section import MAX_WINDOW, CurriculumSection
from slipstream.core.task_view import TaskView
from slipstream.core.types import GroupId
from slipstream.learner.controller.records.task_results import TaskResults
from slipstream.learner.controller.tasks.own_choice import OwnChoice


class Standing(Enum):
    """What the newest groups of a task say about it."""

    UNSEEN = "unseen"
    LEARNING = "learning"
    SOLVED = "solved"
    FAILED = "failed"


class Curriculum:
    """The results of one environment's tasks, and the rule that reads them.

    curriculum.note(group_id, 7, 1.0)  # a group of task 7 had the mean reward 1
    curriculum.passes_over(7, 1)       # rule "skip": whether round 1 leaves task 7 out
    curriculum.draw(100, number)       # rules "sample" and "own": one of 100 tasks
    """

    def __init__(
        self,
        settings: CurriculumSection,
        seed: str,
        results: TaskResults,
        chooser: OwnChoice | None = None,
    ) -> None:
        """`results` are those of an earlier start of the run, and change with `note`.

        `chooser` makes the choices of the rule "own".
        """
        self.settings = settings
        self._chooser = chooser
        self._seed, self._results = seed, results
        self._standings = Counter(self._standing(task) for task in results.tasks())
        # Number of tasks that were passed over, and of draws that were not kept.
        self._passed_over = 0
        # Successes of the tasks chosen since the last metrics; tasks without a result are left out.
        self._chosen: list[float] = []

    def note(self, group_id: GroupId, task_index: int, reward: float) -> None:
        """Takes the mean reward of a group."""
        before = self._standing(task_index)
        self._results.note(group_id, task_index, reward)
        self._standings[before] -= before is not Standing.UNSEEN
        self._standings[self._standing(task_index)] += 1

    def passes_over(self, task_index: int, round_number: int) -> bool:
        """Whether a round leaves a task out, because its newest groups are solved or failed."""
        if self.settings.rule != "skip" or round_number % self.settings.every_rounds == 0:
            return False
        decided = self._standing(task_index) in (Standing.SOLVED, Standing.FAILED)
        self._passed_over += decided
        return decided

    def draw(self, num_tasks: int, number: int) -> int:
        """Draws one of `num_tasks` tasks: any is drawn, and kept with its own probability.

        A draw is kept at least with the probability `floor`, so it ends soon for any number of
        tasks, and no sum over all of them is needed. With the rule "own" the user's class chooses;
        ChoiceFailed where it does not.
        """
        if self._chooser is not None:
            results = self._results
            view = TaskView(
                num_tasks,
                number,
                self._seed,
                tried=results.tasks(),
                rewards=lambda task_index: results.newest(task_index, MAX_WINDOW),
            )
            return self._chooser.choose(view)
        source = random.Random(f"{self._seed}/draw/{number}")
        while True:
            task_index = source.randrange(num_tasks)
            if source.random() < self._worth(task_index):
                return task_index
            self._passed_over += 1

    def chosen(self, task_index: int) -> None:
        """Notes for the metrics that a task was chosen."""
        success = self._success(task_index)
        if success is not None:
            self._chosen.append(success)

    def metrics(self) -> dict[str, float]:
        """What was chosen since the last call, and how the tasks stand; see docs/metrics.md."""
        chosen, self._chosen = self._chosen, []
        found = {f"tasks_{each.value}": float(self._standings[each]) for each in _SEEN}
        found["tasks_passed_over"] = float(self._passed_over)
        if chosen:
            found["chosen_success"] = sum(chosen) / len(chosen)
        return found

    def _success(self, task_index: int) -> float | None:
        rewards = self._results.newest(task_index, self.settings.window)
        if not rewards:
            return None
        return sum(map(self.settings.success, rewards)) / len(rewards)

    def _worth(self, task_index: int) -> float:
        success = self._success(task_index)
        if success is None:
            return 1.0
        return max(4 * success * (1 - success), self.settings.floor)

    def _standing(self, task_index: int) -> Standing:
        rewards = self._results.newest(task_index, self.settings.window)
        if not rewards:
            return Standing.UNSEEN
        successes = {self.settings.success(reward) for reward in rewards}
        if len(rewards) < self.settings.window or successes not in ({0.0}, {1.0}):
            return Standing.LEARNING
        return Standing.SOLVED if successes == {1.0} else Standing.FAILED


_SEEN = (Standing.LEARNING, Standing.SOLVED, Standing.FAILED)
