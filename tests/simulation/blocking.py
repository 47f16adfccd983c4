"""Threads of blocking code on the virtual clock, and the channel through which they call.

One thread runs at any moment. The loop starts a thread and stands still until it waits; while it
waits, the loop goes on. What a thread waits for is a coroutine, which the loop runs for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF, Metadata

from simulation.network import SimulatedCall, SimulatedChannel
from simulation.virtual_loop import PROCESS, Killed

# The thread whose code runs now; None on the loop.
_THREAD: contextvars.ContextVar[_Thread | None] = contextvars.ContextVar(
    "thread", default=None
)


class _Thread:
    """A real thread, which runs only between `go_on` and its next `wait`; it is used again."""

    def __init__(self) -> None:
        # Both locks are released by one side and acquired by the other.
        self._goes, self._stands = threading.Lock(), threading.Lock()
        self._goes.acquire()
        self._stands.acquire()
        self._call: Callable[[], Any] | None = None
        # The call that it waits for; None before the start and after the end.
        self.wish: Awaitable[Any] | None = None
        # The result of its wait, then what the call comes to.
        self.result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run_forever, daemon=True).start()

    def begin(self, call: Callable[..., Any], *args: Any) -> None:
        """Takes the next call, which `go_on` starts."""
        context = contextvars.copy_context()
        context.run(_THREAD.set, self)
        self._call = functools.partial(context.run, call, *args)

    def go_on(self, result: Any = None, error: BaseException | None = None) -> None:
        """Lets the call run until it waits again or ends; raises what it ends with."""
        self.wish = None
        self.result = result
        self._error = error
        self._goes.release()
        self._stands.acquire()
        if self._call is None and self._error is not None:
            error = self._error
            self._error = None
            raise error

    def kill(self) -> None:
        """Ends the call; the thread can begin another one."""
        while self._call is not None:
            with contextlib.suppress(Killed):
                self.go_on(error=Killed())
        self.wish = self.result = None

    def wait(self, wish: Awaitable[Any]) -> Any:
        self.wish = wish
        self._stands.release()
        self._goes.acquire()
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return self.result

    def _run_forever(self) -> None:
        while True:
            self._goes.acquire()
            assert self._call is not None
            try:
                self.result = self._call()
            except BaseException as error:  # noqa: BLE001 - `go_on` raises it
                self._error = error
            self._call = None
            self._stands.release()


# Threads without a call. The threads of a process are not in one that it forks.
_IDLE: list[_Thread] = []
os.register_at_fork(after_in_child=_IDLE.clear)


async def run_blocking(call: Callable[..., Any], *args: Any) -> Any:
    """Runs blocking code in a thread of its own, which has ended it when this coroutine ends."""
    thread = _IDLE.pop() if _IDLE else _Thread()
    thread.begin(call, *args)
    result = None
    error = None
    try:
        while True:
            thread.go_on(result, error)
            if thread.wish is None:
                return thread.result
            result = None
            error = None
            try:
                result = await thread.wish
            except Exception as raised:  # noqa: BLE001 - the thread gets it
                error = raised
    finally:
        thread.kill()
        _IDLE.append(thread)


def wait(wish: Awaitable[Any]) -> Any:
    """Returns what `wish` comes to; blocks the thread of blocking code that calls it."""
    thread = _THREAD.get()
    assert thread is not None, "the loop must not block"
    return thread.wait(wish)


def sleep(seconds: float) -> None:
    """Takes the place of `time.sleep`."""
    wait(asyncio.sleep(seconds))


class _Started:
    """Takes the place of `threading.Thread`; it belongs to the process that starts it."""

    def __init__(self, target: Callable[..., None], args: Any = (), **_: Any) -> None:
        self._target = target
        self._args = args

    def start(self) -> None:
        process = PROCESS.get()
        self._task = process.start(run_blocking(self._target, *self._args))

    def is_alive(self) -> bool:
        return not self._task.done()

    def join(self) -> None:
        wait(asyncio.wait((self._task,)))


class _Event:
    """Takes the place of `threading.Event`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.is_set = self._event.is_set
        self.set = self._event.set

    def wait(self, timeout: float | None = None) -> bool:
        with contextlib.suppress(TimeoutError):
            wait(asyncio.wait_for(self._event.wait(), timeout))
        return self.is_set()


class _RLock:
    """Takes the place of `threading.RLock`."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._depth = 0
        self._owner: _Thread | None = None

    def __enter__(self) -> None:
        if self._owner is not _THREAD.get():
            taking = self._lock.acquire()
            if self._lock.locked() or self._lock._waiters:
                wait(taking)
            else:
                # To wait for what is there already would only cost time.
                with contextlib.suppress(StopIteration):
                    taking.send(None)
            self._owner = _THREAD.get()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()


# Takes the place of the module `threading` in a module of blocking code.
THREADING = SimpleNamespace(Thread=_Started, Event=_Event, RLock=_RLock, Lock=_RLock)


class BlockingChannel(SimulatedChannel):
    """A channel whose calls block their thread; errors are those of `SimulatedCall`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls: list[SimulatedCall] = []

    def unary_stream(self, method: str, **coders: Any) -> Any:
        start = super().unary_unary(method, **coders)

        def call(request: Any, **named: Any) -> _Stream:
            self._calls.append(start(request, **named))
            return _Stream(self._calls[-1])

        return call

    def unary_unary(self, method: str, **coders: Any) -> Any:
        stream = self.unary_stream(method, **coders)

        def call(request: Any, **named: Any) -> Any:
            return wait(stream(request, **named).only_answer())

        return call

    def close(self) -> None:  # type: ignore[override]
        for call in self._calls:
            call.cancel()


class _Stream:
    """The answers of one call."""

    def __init__(self, call: SimulatedCall) -> None:
        self._call = call
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[Any]:
        while (message := self._taken() or wait(self._read())) is not EOF:
            yield message

    async def only_answer(self) -> Any:
        answer = await self._read()
        end = await self._read()
        assert end is EOF
        return answer

    def _taken(self) -> Any:
        """What is there already; None if nothing is."""
        return self._call._received.pop(0) if self._call._received else None

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise grpc.aio.AioRpcError(
                code, Metadata(), Metadata(), "cancelled"
            ) from None
