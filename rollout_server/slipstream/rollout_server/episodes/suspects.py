"""The tasks of an environment that run alone in a worker, because workers ended while they ran.

A worker that ends takes all its episodes with it, and one of them may be to blame. None of their
attempts counts then, but tasks whose calls were being answered become suspects. Their episodes get
a worker of their own from then on, and a second end there is their own fault. A task that only lost
its worker becomes a suspect when that happens repeatedly: the cause need not be in a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# Ends of workers in a row after which a task is a suspect, even if it was in no call then.
MAX_LOST_WORKERS = 2


class Suspects:
    """The suspects of one environment; pure state without I/O.

    A task that was in a call when its worker ended is a suspect until an episode of it has passed:

        lost([3, 4, 5], in_call=[4]) -> 4 runs alone; passed(4) -> 4 shares a worker again
    """

    def __init__(self) -> None:
        self._suspected: set[int] = set()
        self._lost: Counter[int] = Counter()

    def runs_alone(self, task: int) -> bool:
        """Whether episodes of this task get a worker of their own."""
        return task in self._suspected

    def lost(self, tasks: Iterable[int], *, in_call: Iterable[int]) -> None:
        """Notes the end of a worker with episodes of `tasks`, which answered calls of `in_call`."""
        self._lost.update(set(tasks))
        often = {task for task, times in self._lost.items() if times >= MAX_LOST_WORKERS}
        self._suspected |= often | set(in_call)

    def passed(self, task: int) -> None:
        """Notes that an episode of this task was judged and its worker did not end."""
        self._suspected.discard(task)
        self._lost.pop(task, None)
