"""Which tasks of an environment run alone in a worker, since workers ended while they ran.

A worker that ends takes all its episodes with it, and one of them may be to blame. Nobody's attempt
counts then, but the tasks whose calls were being answered are suspects: from then on their episodes
have a worker of their own, where a second end is their own doing. Tasks that only lost their worker
become suspects when that happens to them repeatedly: what ends a worker need not be in a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# So many workers may end under a task before it is a suspect without having been in a call.
MAX_LOST_WORKERS = 2


class Suspects:
    """The suspects of one environment; pure state.

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
        """A worker ended with episodes of `tasks`; it was answering calls of those `in_call`."""
        self._lost.update(set(tasks))
        often = {task for task, times in self._lost.items() if times >= MAX_LOST_WORKERS}
        self._suspected |= often | set(in_call)

    def passed(self, task: int) -> None:
        """An episode of this task was judged, and its worker went on."""
        self._suspected.discard(task)
        self._lost.pop(task, None)
