"""Classes that choose tasks, as users write them."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from slipstream.client import TaskView


class NearestToHalf:
    """Tries every task once, then the one whose newest reward is nearest to `target`."""

    def __init__(self, target: float = 0.5) -> None:
        self._target = target

    def choose(self, tasks: TaskView) -> int:
        if len(tasks.tried) < tasks.num_tasks:
            return tasks.random.choice(sorted(set(range(tasks.num_tasks)) - {*tasks.tried}))
        return min(tasks.tried, key=lambda task: abs(tasks.rewards(task)[-1] - self._target))


class Odd:
    """Does what a chooser must not, from the choice `after` on."""

    def __init__(self, what: str, after: int = 0) -> None:
        self._what, self._after = what, after

    def choose(self, tasks: TaskView) -> Any:
        if tasks.number < self._after:
            return tasks.number % tasks.num_tasks
        match self._what:
            case "raise":
                raise KeyError("no such task")
            case "exit":
                sys.exit(3)
            case "hang":
                deadline_s = time.monotonic() + 60
                while time.monotonic() < deadline_s:
                    pass
            case "float":
                return 1.0
            case "true":
                return True
            case "outside":
                return tasks.num_tasks
        return -1


class Refusing:
    def __init__(self) -> None:
        raise OSError(f"{os.sep}data is gone")


class NoChoice:
    pass
