"""One run of an agent's code: as a task of the event loop, or in a thread of its own.

Consumes: a task, an endpoint. Produces: what `run` returned or raised. Waits for: the agent.
Unblocked by: its end, or `end`, which interrupts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.client.agent import AgentEnvironment, Endpoint
from slipstream.client.witness import awaited_place, running_place

# Everything that code of an agent may raise; asyncio would end the event loop at some of these.
RAISED = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)


class EpisodeOver(SystemExit):
    """Raised inside a plain `run` whose episode has ended, wherever its thread is in Python."""


@dataclass(frozen=True)
class _Outcome:
    """What `run` returned, or raised."""

    value: object = None
    error: BaseException | None = None


class AgentRun:
    """A started run; `end` it in any case."""

    def __init__(
        self, environment: AgentEnvironment[Any], task: object, endpoint: Endpoint
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._from_thread: asyncio.Future[_Outcome] = self._loop.create_future()
        run = environment.run
        is_async = inspect.iscoroutinefunction(run)
        self.task: asyncio.Task[_Outcome] = self._loop.create_task(
            self._await_run(lambda: run(task, endpoint), in_thread=not is_async)
        )

    def result(self) -> object:
        """Returns the result of `run`, or raises its error; only after its end."""
        if self.task.cancelled():
            raise asyncio.CancelledError
        outcome = self.task.result()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def place(self) -> str:
        """Returns file, line and function where the run is; "" if that is not known."""
        thread = self._thread
        if thread is None:
            return awaited_place(self.task)
        if thread.ident is None or thread.ident not in sys._current_frames():
            return ""
        return running_place(thread.ident)

    @property
    def is_alive(self) -> bool:
        """Whether code of the run may still run."""
        return not self.task.done() or (self._thread is not None and self._thread.is_alive())

    async def end(self, limit_s: float) -> bool:
        """Interrupts the run; returns whether it has ended within `limit_s`."""
        if self.task.done():
            return True
        if self._thread is not None:
            _interrupt(self._thread)
        else:
            self.task.cancel()
        done, _ = await asyncio.wait([self.task], timeout=limit_s)
        if not done:
            # A thread that hangs in C code can only be left alone.
            self.task.cancel()
        return bool(done)

    async def _await_run(self, run: Callable[[], object], *, in_thread: bool) -> _Outcome:
        """Never raises, except when it is cancelled: SystemExit would end the event loop."""
        try:
            if in_thread:
                self._start_thread(run)
                outcome = await self._from_thread
                if not inspect.isawaitable(outcome.value):
                    return outcome
                self._thread = None
                value: object = outcome.value
            else:
                value = run()
            return _Outcome(await value if inspect.isawaitable(value) else value)
        except RAISED as error:
            this = asyncio.current_task()
            assert this is not None
            if isinstance(error, asyncio.CancelledError) and this.cancelling():
                raise
            return _Outcome(error=error)

    def _start_thread(self, run: Callable[[], object]) -> None:
        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome = _Outcome(context.run(run))
            except RAISED as error:
                outcome = _Outcome(error=error)
            with contextlib.suppress(RuntimeError):
                # The loop is closed when the whole process ends.
                self._loop.call_soon_threadsafe(self._deliver, outcome)

        self._thread = threading.Thread(target=work, name="agent", daemon=True)
        self._thread.start()

    def _deliver(self, outcome: _Outcome) -> None:
        if not self._from_thread.done():
            self._from_thread.set_result(outcome)


def _interrupt(thread: threading.Thread) -> None:
    """Raises EpisodeOver in `thread`; it takes effect when its next line of Python runs.

    A thread that has ended is left alone: another one may have its number.
    """
    if thread.ident is not None and thread.is_alive():
        raised = ctypes.py_object(EpisodeOver)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
