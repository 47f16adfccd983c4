"""Workers with one episode at a time, for tasks that may end their worker.

Consumes: turns of episodes. Produces: a worker for each turn. Waits for: a turn, its worker, the
end of its episode. Unblocked by: a new turn, the worker's own limits, the episode.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.rollout_server.episodes.workers import EnvironmentWorker


@dataclass(order=True)
class Turn:
    """One episode that waits for a worker; those with more attempts behind them go first.

    In this order the culprit among suspects is set aside after the fewest ends of a worker.
    """

    rank: tuple[int, int]
    worker: asyncio.Future[EnvironmentWorker] = field(compare=False)
    over: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    has_passed: bool = field(default=False, compare=False)

    def end(self, has_passed: bool) -> None:
        """Ends the turn; after an episode that `has_passed` the worker can be used again."""
        self.has_passed = has_passed
        self.over.set()


class LoneWorkers:
    """Gives each episode a worker of its own; no worker runs while no episode waits."""

    def __init__(self, make: Callable[[], EnvironmentWorker], *, first: int, count: int) -> None:
        """Runs at most `count` workers at one time, their logs numbered from `first` on."""
        self._make = make
        self._indices = range(first, first + count)
        self._turns: asyncio.PriorityQueue[Turn] = asyncio.PriorityQueue()
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Serves turns until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for index in self._indices:
                group.create_task(self._keep(index))

    async def turn(self, attempt: int) -> tuple[EnvironmentWorker, Turn]:
        """Waits for a worker without other episodes; EnvironmentFailed when it cannot load."""
        worker = asyncio.get_running_loop().create_future()
        turn = Turn((-attempt, next(self._numbers)), worker)
        self._turns.put_nowait(turn)
        try:
            return await worker, turn
        except asyncio.CancelledError:
            # The turn may have been given a worker at this very moment.
            turn.over.set()
            raise

    async def _keep(self, index: int) -> None:
        while True:
            first = await self._turns.get()
            if first.worker.cancelled():
                continue
            worker, loaded = self._make(), asyncio.Event()

            def on_load(_: int, loaded: asyncio.Event = loaded) -> None:
                loaded.set()

            async with asyncio.TaskGroup() as group:
                running = group.create_task(worker.run(index, on_load))
                serving = group.create_task(self._serve(worker, loaded, first))
                await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()
                if running.done() and not first.worker.done():
                    first.worker.set_exception(running.result())
                running.cancel()

    async def _serve(self, worker: EnvironmentWorker, loaded: asyncio.Event, first: Turn) -> None:
        """Gives the worker to one episode after another, as long as each leaves it usable."""
        await loaded.wait()
        turn = first
        while True:
            if not turn.worker.cancelled():
                turn.worker.set_result(worker)
                await turn.over.wait()
                if not turn.has_passed:
                    return
            if self._turns.empty():
                return
            turn = self._turns.get_nowait()
