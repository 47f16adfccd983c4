"""Runs the code of agents for the open episodes of one process, which share one HTTP gateway.

An async `run` is a task of the event loop; a plain `run` has a thread of its own. Consumes: a task
of the environment, an endpoint. Produces: the result of `run`, or the error that it raised. Waits
for: the agent. Unblocked by: the end of its run, or `end`, which interrupts the run.
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
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.client.agent_exchange import CallExchange
from slipstream.client.conversion import agent_result
from slipstream.client.environment import AgentEnvironment
from slipstream.client.environment_loader import awaited_place, running_place
from slipstream.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from slipstream.client.agent_gateway import Gateway

# Seconds that a run may take to end after it was interrupted.
END_LIMIT_S = 10.0
# Called with True when the code of a run works, with False when it waits for a reply or has ended.
OnBusy = Callable[["asyncio.Task[Any]", bool], None]


class EpisodeOver(SystemExit):
    """Interrupts a plain `run` in its thread, at any line of Python, when its episode has ended."""


@dataclass(frozen=True)
class _Outcome:
    """The result of `run`, or the error that it raised."""

    value: object = None
    error: BaseException | None = None


class AgentEpisode:
    """One episode of an agent: `next()` returns each call of the agent, then the result of `run`.

    The first `next()` starts `run`; `exchange` passes the parts of replies to the agent. `end` ends
    the episode at any time. Calls to the endpoint are refused as soon as `run` has returned.
    """

    def __init__(
        self, environment: AgentEnvironment[Any], task: object, gateway: Gateway, *, on_busy: OnBusy
    ) -> None:
        self._gateway = gateway
        self._on_busy = on_busy
        self._is_busy = False
        self.exchange = CallExchange(on_waiting=lambda is_waiting: self._note_busy(not is_waiting))
        self._endpoint = gateway.open(
            self.exchange,
            by_socket=environment.needs_socket,
            by_url=environment.needs_url,
        )
        self._code = partial(environment.run, task, self._endpoint)
        self._is_plain = not inspect.iscoroutinefunction(environment.run)
        self._run: asyncio.Task[_Outcome] | None = None
        self._thread: threading.Thread | None = None

    async def next(self) -> pb.AgentCall | pb.AgentResult:
        """Waits for the agent's next call and returns it, or the result of `run` after its end.

        Raises the error that `run` raised, or EnvironmentFailed if the result is invalid.
        """
        if self._run is None:
            self._run = asyncio.get_running_loop().create_task(self._outcome())
            self._note_busy(True)
            self._run.add_done_callback(lambda _: self._stop_calls())
        call = await self.exchange.next()
        if call is not None:
            return call
        if self._run.cancelled():
            raise asyncio.CancelledError
        outcome = self._run.result()
        if outcome.error is not None:
            raise outcome.error
        return agent_result(outcome.value)

    def place(self) -> str:
        """Returns file, line and function where the agent's code is, or "" if that is not known."""
        thread = self._thread
        if thread is None:
            return "" if self._run is None else awaited_place(self._run)
        if thread.ident is None or thread.ident not in sys._current_frames():
            return ""
        return running_place(thread.ident)

    @property
    def is_alive(self) -> bool:
        runs = self._run is not None and not self._run.done()
        return runs or (self._thread is not None and self._thread.is_alive())

    async def end(self) -> bool:
        """Interrupts the run; returns whether it has ended within `END_LIMIT_S`."""
        self._stop_calls()
        if self._run is None or self._run.done():
            return True
        thread = self._thread
        if thread is None:
            self._run.cancel()
        elif thread.ident is not None and thread.is_alive():
            # Raised at the thread's next line of Python. One that has ended may have given its id
            # to another thread.
            raised = ctypes.py_object(EpisodeOver)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
        done, _ = await asyncio.wait([self._run], timeout=END_LIMIT_S)
        if not done:
            # A thread that hangs in C code can only be left running.
            self._run.cancel()
        return bool(done)

    def _note_busy(self, is_busy: bool) -> None:
        is_busy = is_busy and not self.exchange.has_ended
        if self._run is not None and is_busy != self._is_busy:
            self._is_busy = is_busy
            self._on_busy(self._run, is_busy)

    def _stop_calls(self) -> None:
        if not self.exchange.has_ended:
            self._gateway.forget(self._endpoint)
            self.exchange.end()
            self._note_busy(False)

    async def _outcome(self) -> _Outcome:
        """Runs the agent's code to its end and returns the outcome, perhaps such as SystemExit.

        Raised here, a SystemExit would end the event loop. Raises CancelledError if this task is
        cancelled.
        """
        loop = asyncio.get_running_loop()
        this = asyncio.current_task()
        assert this is not None
        try:
            if not self._is_plain:
                value = self._code()
                return _Outcome(await value if inspect.isawaitable(value) else value)
            context = contextvars.copy_context()
            ended = loop.create_future()

            def deliver(outcome: _Outcome) -> None:
                if not ended.done():
                    ended.set_result(outcome)

            def work() -> None:
                try:
                    outcome = _Outcome(context.run(self._code))
                except BaseException as error:  # noqa: BLE001 - `next` raises it
                    outcome = _Outcome(error=error)
                with contextlib.suppress(RuntimeError):
                    # The loop is closed when the whole process ends.
                    loop.call_soon_threadsafe(deliver, outcome)

            self._thread = threading.Thread(target=work, name="agent", daemon=True)
            self._thread.start()
            outcome: _Outcome = await ended
            if not inspect.isawaitable(outcome.value):
                return outcome
            # The rest of the run is no longer in the thread.
            self._thread = None
            return _Outcome(await outcome.value)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and this.cancelling():
                raise
            return _Outcome(error=error)
