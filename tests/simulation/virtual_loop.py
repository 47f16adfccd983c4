"""An event loop on a virtual clock; its tasks belong to simulated processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

START_S = 1000.0
UNIX_S = 1.7e9
# The simulated process whose code runs now; None for the rig itself.
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Killed(BaseException):
    """Ends the code of a process at the point where it was killed."""


class Process:
    """One simulated process: `start` its main coroutine once; `kill` drops all of its tasks."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name, self.is_alive = name, True
        self._loop = loop
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self.tasks: list[asyncio.Task] = []
        # Called once, when the process ends in whatever way.
        self.at_end: list[Callable[[], None]] = []
        # Open files, which its end closes.
        self.files: list[Any] = []
        # While the process is stopped: all that would have run, in order.
        self.held: list[asyncio.Handle] | None = None

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return self.context.run(self._loop.create_task, main)

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a function as code of this process."""
        return self.context.copy().run(call, *args)

    def stop(self, seconds: float) -> None:
        """Lets nothing of the process run for a while, as SIGSTOP and SIGCONT do."""
        self.held = []
        self._loop.call_later(seconds, self._go_on, context=contextvars.Context())

    def _go_on(self) -> None:
        held, self.held = self.held or [], None
        self._loop._ready.extend(held)

    def die(self) -> None:
        """Ends the process at this moment: nothing of it runs, sends or writes any more."""
        if not self.is_alive:
            return
        self.is_alive = False
        for call in self.at_end:
            call()

    def bury(self) -> None:
        """Closes the coroutines of a dead process; call it from outside the process."""
        assert not self.is_alive
        for task in reversed(self.tasks):
            if task.done():
                continue
            task._log_destroy_pending = False
            self.run(_close, task.get_coro())
        self.tasks.clear()


def _close(coro: Any) -> None:
    """Ends a coroutine that may wait again while it is ended."""
    for _ in range(50):
        try:
            coro.close()
        except BaseException:  # noqa: BLE001 - it may raise anything
            continue
        return


class _Selector:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise RuntimeError("every simulated task waits and no timer is set")
        self._loop.now_s += max(timeout, 0.0)
        return []


class _Handle(asyncio.Handle):
    def _run(self) -> None:
        process = self._context.get(PROCESS)
        if process is not None and process.held is not None:
            process.held.append(self)
        elif process is None or process.is_alive:
            asyncio.Handle._run(self)


class _TimerHandle(asyncio.TimerHandle):
    _run = _Handle._run


class _Task(asyncio.Task):
    """A task whose place in a set depends on the order of creation, not on its address."""

    def __init__(self, *args: Any, number: int, **named: Any) -> None:
        self._number = number
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs timers in the order of a clock that jumps to the next one.

    Functions given to executors run on the loop, a random moment after they were given, and
    their callers go on another moment later.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now_s = START_S
        self.random = random.Random(f"loop/{seed}")
        # Longest time of a function in a thread, in seconds; a slow disk has more.
        self.thread_s = 0.004
        self._selector = _Selector(self)
        self._clock_resolution = 1e-9
        self._numbers = 0
        self._generators: dict[int, Process | None] = {}
        self.unhandled: list[str] = []
        self.set_task_factory(_make_task)
        self.set_exception_handler(self._note_unhandled)

    def time(self) -> float:
        return self.now_s

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def create_future(self) -> asyncio.Future:
        return _Future(self.number(), self)

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def run_in_executor(self, executor: object, func: Any, *args: Any) -> asyncio.Future:
        done = self.create_future()
        took_s = self.random.uniform(0.0, self.thread_s)
        self.call_later(took_s * self.random.random(), self._run_function, done, took_s, func, args)
        return done

    def _run_function(self, done: asyncio.Future, took_s: float, func: Any, args: Any) -> None:
        result, error = None, None
        try:
            result = func(*args)
        except StopIteration as raised:
            error = RuntimeError(f"StopIteration {raised}")
        except Exception as raised:  # noqa: BLE001 - passed on
            error = raised
        except Killed:
            return
        self.call_later(took_s * self.random.random(), _settle, done, result, error)

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        self._generators[id(agen)] = PROCESS.get()

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        process = self._generators.pop(id(agen), None)
        if process is not None and process.is_alive and not self.is_closed():
            process.start(agen.aclose())

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note_unhandled(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Killed):
            return
        self.unhandled.append(f"{context['message']}: {error!r}")


def _settle(done: asyncio.Future, result: object, error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _make_task(loop: VirtualLoop, coro: Any, **named: Any) -> asyncio.Task:
    task = _Task(coro, loop=loop, number=loop.number(), **named)
    process = PROCESS.get()
    if process is not None:
        process.tasks.append(task)
    return task


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Lets the clocks and the secrets of the standard library be those of the simulation."""
    source = random.Random(f"secrets/{seed}")
    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time", lambda: UNIX_S + loop.now_s),
        (time, "time_ns", lambda: int((UNIX_S + loop.now_s) * 1e9)),
        (secrets, "token_bytes", lambda n=32: source.randbytes(n)),
        (secrets, "token_hex", lambda n=32: source.randbytes(n).hex()),
        (secrets, "randbits", source.getrandbits),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)
