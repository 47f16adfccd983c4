"""The results of an environment's tasks, from which the weights of the next draws are made.

Events of tasks wait in a list until a record of the journal says how many of them are in the sums.
So the sums are those of a point in the journal, live and after a restart, however long weights take
to compute.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from slipstream.learner.algorithms.task_results import TaskResults

# Larger environments have no tables: each copy of one would take seconds.
MAX_TASKS = 1_000_000

# "drawn": task, step. "finished": task, mean reward, episodes, passed episodes. "failed": task.
Event = tuple[str, int, float, int, int]


class TaskTable:
    """The results of each task: sums over the events that were taken, and the later events."""

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks
        # The step for which the newest weights were made.
        self.step = 0
        self.pending: list[Event] = []
        self._groups = np.zeros(num_tasks, dtype=np.int64)
        self._failures = np.zeros(num_tasks, dtype=np.int64)
        self._episodes = np.zeros(num_tasks, dtype=np.int64)
        self._passed = np.zeros(num_tasks, dtype=np.int64)
        # The step of the newest draw; -1 before the first.
        self._drawn_at = np.full(num_tasks, -1, dtype=np.int64)
        self._reward_sum = np.zeros(num_tasks)
        self._last_reward = np.full(num_tasks, np.nan)

    @property
    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return (
            self._groups,
            self._failures,
            self._episodes,
            self._passed,
            self._drawn_at,
            self._reward_sum,
            self._last_reward,
        )

    def drawn(self, task: int, step: int) -> None:
        """Notes a group of a task that was leased while the batch of `step` was formed."""
        self._note(("drawn", task, 0.0, step, 0))

    def finished(
        self,
        task: int,
        reward: float,
        episodes: int,
        passed: int,
    ) -> None:
        """Notes a group that finished: its mean reward, and how many of its episodes passed."""
        self._note(("finished", task, reward, episodes, passed))

    def failed(self, task: int) -> None:
        """Notes a group that was set aside."""
        self._note(("failed", task, 0.0, 0, 0))

    def _note(self, event: Event) -> None:
        # A group of earlier tasks may end after the table began.
        if 0 <= event[1] < self.num_tasks:
            self.pending.append(event)

    def take(self, events: int) -> None:
        """Adds the first `events` of the pending events to the sums."""
        self._add(self.pending[:events])
        del self.pending[:events]

    def _add(self, events: Iterable[Event]) -> None:
        for kind, task, reward, count, passed in events:
            if kind == "drawn":
                self._drawn_at[task] = count
            elif kind == "failed":
                self._failures[task] += 1
            else:
                self._groups[task] += 1
                self._episodes[task] += count
                self._passed[task] += passed
                self._reward_sum[task] += reward
                self._last_reward[task] = reward

    def results(
        self,
        environment: str,
        events: Sequence[Event],
        step: int,
    ) -> TaskResults:
        """Returns what a sampler sees, as if `events` were in the sums already, at `step`.

        The table stays as it is; another thread may call this until `take` is called.
        """
        then = TaskTable(0)
        copies = [column.copy() for column in self._columns]
        then._restore(copies)
        then._add(events)
        groups = then._groups
        episodes = then._episodes
        reward_mean = np.full(self.num_tasks, np.nan)
        np.divide(
            then._reward_sum,
            groups,
            out=reward_mean,
            where=groups > 0,
        )
        pass_fraction = np.full(self.num_tasks, np.nan)
        np.divide(
            then._passed,
            episodes,
            out=pass_fraction,
            where=episodes > 0,
        )
        is_new = then._drawn_at < 0
        waited = step - then._drawn_at
        steps_since_drawn = np.where(is_new, -1, waited)
        return TaskResults(
            environment=environment,
            step=step,
            groups=groups,
            failures=then._failures,
            reward_mean=reward_mean,
            last_reward=then._last_reward,
            pass_fraction=pass_fraction,
            steps_since_drawn=steps_since_drawn,
        )

    def _restore(self, columns: Sequence[npt.NDArray[Any]]) -> None:
        (
            self._groups,
            self._failures,
            self._episodes,
            self._passed,
            self._drawn_at,
            self._reward_sum,
            self._last_reward,
        ) = columns
        self.num_tasks = len(self._groups)

    def stored(self) -> list[object]:
        """Returns the content as plain values, for `restored`."""
        columns = [column.tobytes() for column in self._columns]
        return [self.step, self.pending, columns]

    @classmethod
    def restored(cls, stored: Sequence[Any]) -> Self:
        """Returns the table whose content `stored` returned."""
        step, pending, columns = stored
        table = cls(0)
        empty = table._columns
        table._restore(
            [
                np.frombuffer(data, dtype=column.dtype).copy()
                for data, column in zip(columns, empty, strict=True)
            ]
        )
        table.step = step
        table.pending = [tuple(event) for event in pending]
        return table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskTable) and self.stored() == other.stored()

    __hash__ = None  # type: ignore[assignment]
