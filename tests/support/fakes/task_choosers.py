"""Classes that choose tasks, as users write them."""

from __future__ import annotations

import asyncio
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
            case "swallow" | "swallow all":
                swallowed = Exception if self._what == "swallow" else BaseException
                deadline_s = time.monotonic() + 60
                while time.monotonic() < deadline_s:
                    try:
                        while time.monotonic() < deadline_s:
                            pass
                    except swallowed:
                        pass
            case "cancelled":
                raise asyncio.CancelledError
            case "generator exit":
                raise GeneratorExit
            case "mute error":
                raise MuteError
            case "mute":
                return Mute()
            case "number":
                return Number()
            case "huge":
                return 10**5000
            case "text":
                return "x" * 10_000
            case "float":
                return 1.0
            case "true":
                return True
            case "outside":
                return tasks.num_tasks
        return -1


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError


class Number(int):
    """No number can be compared with it."""

    def __le__(self, other: object) -> bool:
        raise GeneratorExit

    __ge__ = __lt__ = __gt__ = __le__


class Refusing:
    def __init__(self) -> None:
        raise OSError(f"{os.sep}data is gone")


class NoChoice:
    pass
