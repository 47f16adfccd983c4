"""The newest mean rewards of each task's groups, as the journal has them."""

from __future__ import annotations

from slipstream.core.settings.curriculum_section import MAX_WINDOW
from slipstream.core.types import GroupId


class TaskResults:
    """The mean rewards of at most `MAX_WINDOW` newest groups of each task; pure state."""

    def __init__(self) -> None:
        self._newest: dict[int, dict[GroupId, float]] = {}

    def note(self, group_id: GroupId, task_index: int, reward: float) -> None:
        """Takes one result; a group that is played again replaces its result."""
        newest = self._newest.setdefault(task_index, {})
        newest[group_id] = reward
        if len(newest) > MAX_WINDOW:
            del newest[next(iter(newest))]

    def newest(self, task_index: int, number: int) -> list[float]:
        """The rewards of at most `number` newest groups of a task, oldest first."""
        return list(self._newest.get(task_index, {}).values())[-number:]

    def tasks(self) -> list[int]:
        """The tasks with a result."""
        return list(self._newest)
