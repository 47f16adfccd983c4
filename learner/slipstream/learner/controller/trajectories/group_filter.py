"""Leaves groups with equal rewards out of batches.

Too many in a row mean that the task is solved, or that the run is stuck.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms.groups import is_trained
from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.records.history import (
    FilteredGroups,
    FilterVerdict,
    RunHistory,
    TrajectoryEnd,
    is_solved,
)
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.trajectories.endings import Endings


class GroupFilter:
    """Dynamic sampling: `filter` ends a complete group that teaches nothing.

    When too many groups in a row are left out, the run is solved, or it fails.
    """

    def __init__(
        self,
        run: Run,
        books: Books,
        endings: Endings,
        *,
        withdraw: Callable[[Sequence[Group], str], None],
    ) -> None:
        """`withdraw` takes groups out of the run, with the cause."""
        self._run, self._progress = run, run.progress
        self._book, self._environments = books.leases, books.environments
        self._journal, self._endings, self._withdraw = books.journal, endings, withdraw
        # Number of filtered groups, by the step whose batch was being formed.
        self.by_step: Counter[int] = Counter()
        # The groups that were left out while the batch of this step was formed.
        self._newest, self._newest_step = FilteredGroups(), 0

    def restore(self, history: RunHistory) -> None:
        """Takes over the journal's counts."""
        self.by_step = history.filtered_groups
        self._newest, self._newest_step = history.filtered, history.next_step

    def filter(self, group: Group) -> None:
        """Leaves a complete group out if the filter of its environment does not keep it.

        A faulty function of the algorithm fails the run.
        """
        config = self._run.config
        algorithm = config.algorithm_of(group.environment)
        try:
            if algorithm.filter == "none" or is_trained(group.in_order(), algorithm, config):
                return
        except RunFailed as error:
            self._progress.fail(str(error))
            return
        step = self._book.step
        if self._newest_step != step:
            self._newest.clear()
            self._newest_step = step
        rewards = [trajectory.reward for trajectory in group.in_order()]
        solved, mean = is_solved(rewards, algorithm.solved_reward), statistics.fmean(rewards)
        self._newest.add(group.environment, mean, solved=solved)
        self.by_step[step] += 1
        self._book.remove(group.group_id)
        self._environments.group_accepted(group.environment, is_filtered=True)
        is_equal = algorithm.filter == "unequal_rewards"
        cause = (
            "all rewards of its group are equal" if is_equal else f"left out by {algorithm.filter}"
        )
        self._journal.append(
            "closed", group=group.group_id, how="filtered", cause=cause, solved=solved, reward=mean
        )
        for trajectory in group.in_order():
            self._endings.end(trajectory, TrajectoryEnd.FILTERED, cause)
        self._judge(step)

    def _judge(self, step: int) -> None:
        algorithm, filtered = self._run.config.algorithm, self._newest
        verdict = filtered.verdict(algorithm.max_filtered_batches * algorithm.groups_per_step)
        if verdict is FilterVerdict.GO_ON or self._progress.is_over or self._progress.solved:
            return
        if self._book.has_whole_batch:
            # The next batch is complete already: the trainer is slow, not the tasks stuck.
            return
        count = (
            f"{filtered.total} groups were left out by algorithm.filter while the batch of "
            f"step {step + 1} was formed ({filtered.describe()})"
        )
        if verdict is FilterVerdict.STUCK:
            self._progress.fail(
                f"{count}, as many as algorithm.max_filtered_batches = "
                f"{algorithm.max_filtered_batches} allows; solved are those whose rewards all "
                f"reach solved_reward = {algorithm.solved_reward:g}"
            )
            return
        cause = f"the task is solved: the last {count}"
        self._journal.append("solved", step=step, cause=cause)
        self._progress.solve(step, cause)
        # The withdrawal frees servers for the last evaluation.
        self._withdraw(self._book.training_groups(), cause)
