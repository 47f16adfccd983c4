"""An event loop on a virtual clock; its tasks belong to simulated processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import math
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

START_S = 1000.0
UNIX_S = 1.7e9
CLOCK_RESOLUTION_S = 1e-9
# A long run makes a fifth of that.
MAX_CALLS = 30_000
# The set of all tasks, which has another name from Python 3.12 on.
_ALL_TASKS: Any = getattr(asyncio.tasks, "_scheduled_tasks", None)
if _ALL_TASKS is None:
    _ALL_TASKS = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
# The simulated process whose code runs now; None for the rig itself.
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar(
    "process", default=None
)


class Killed(BaseException):
    """Ends the code of a process at the point where it was killed."""


class RunStuck(Exception):
    """The run will not end, or makes so many calls that it takes too long."""


class Process:
    """One simulated process: `start` its main coroutine once; `kill` drops all of its tasks."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_alive = True
        self._loop = loop
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self.tasks: list[asyncio.Task] = []
        # Called once, when the process ends in whatever way.
        self.at_end: list[Callable[[], None]] = []
        # Open files, which its end closes.
        self.files: list[Any] = []
        # While the process is stopped: all that would have run, in order.
        self.held: list[_Handle | _Timer] | None = None

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
        handles = self.held or []
        self.held = None
        self._loop._ready.extend(handles)

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
        # Coroutines that are closed may start others.
        while self.tasks:
            task = self.tasks.pop()
            if not task.done():
                task._log_destroy_pending = False
                self.run(_close, task.get_coro())


def _close(coro: Any) -> None:
    """Ends a coroutine that may wait again while it is ended."""
    for _ in range(50):
        try:
            coro.close()
        except BaseException:  # noqa: BLE001 - it may raise anything
            continue
        return


class _Handle:
    """A call that is due; it is made if its process lives, and kept while that is stopped."""

    __slots__ = ("args", "call", "context", "is_cancelled")

    def __init__(
        self, call: Any, args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.call = call
        self.args = args
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.call = self.args = None

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Timer(float):
    """A call at a time, which is the number itself: a heap compares numbers without our code."""

    __slots__ = ("_loop", "args", "call", "context", "is_cancelled", "is_scheduled")

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self._loop.num_cancelled += self.is_scheduled
            self.call = self.args = None

    cancelled = _Handle.cancelled


class _Task(asyncio.Task):
    """A task whose place in a set depends on the order of creation, not on its address."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future):
    _number: int

    __hash__ = _Task.__hash__


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
        self._num_calls = 0
        # Timers in the heap that are cancelled.
        self.num_cancelled = 0
        self._timers: list[_Timer] = []
        self._numbers = 0
        self._generators: dict[int, Process | None] = {}
        self.unhandled: list[str] = []
        # Every future asks; this answers without our code.
        self.get_debug = False.__bool__  # type: ignore[method-assign]
        self.set_exception_handler(self._note_unhandled)

    def time(self) -> float:
        return self.now_s

    def create_future(self) -> asyncio.Future:
        future = _Future(loop=self)
        self._numbers = future._number = self._numbers + 1
        return future

    def create_task(  # type: ignore[override]
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task:
        task = _Task(coro, loop=self, name=name, context=context)
        self._numbers = task._number = self._numbers + 1
        process = PROCESS.get()
        if process is not None:
            process.tasks.append(task)
        return task

    def call_soon(  # type: ignore[override]
        self, call: Any, *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        handle = _Handle(
            call, args, contextvars.copy_context() if context is None else context
        )
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(  # type: ignore[override]
        self,
        when: float,
        call: Any,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Timer:
        timer = _Timer(when)
        timer.call = call
        timer.args = args
        timer._loop = self
        timer.context = contextvars.copy_context() if context is None else context
        timer.is_cancelled = False
        timer.is_scheduled = True
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        call: Any,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Timer:
        when = self.now_s + delay
        if delay > 0.0 and when == self.now_s:
            # Time passes, as for whoever waits again and again for what rounding leaves.
            when = math.nextafter(when, math.inf)
        return self.call_at(when, call, *args, context=context)

    def _run_once(self) -> None:
        """Runs until `stop`, instead of once: most rounds make a single call."""
        ready = self._ready
        while not self._stopping:
            timers = self._timers
            if len(timers) > 100 and 2 * self.num_cancelled > len(timers):
                self._timers = timers = [
                    timer for timer in timers if not timer.is_cancelled
                ]
                heapq.heapify(timers)
                self.num_cancelled = 0
            while timers and timers[0].is_cancelled:
                self.num_cancelled -= 1
                heapq.heappop(timers).is_scheduled = False
            if not ready:
                if not timers:
                    raise RunStuck("every task waits and no timer is set")
                self.now_s += max(timers[0] - self.now_s, 0.0)
            end_s = self.now_s + CLOCK_RESOLUTION_S
            while timers and timers[0] < end_s:
                timer = heapq.heappop(timers)
                timer.is_scheduled = False
                ready.append(timer)
                self.now_s = max(self.now_s, float(timer))
            self._num_calls += len(ready)
            if self._num_calls > MAX_CALLS:
                raise RunStuck(f"the run does not end in {MAX_CALLS} calls")
            for _ in range(len(ready)):
                due = ready.popleft()
                if due.is_cancelled:
                    continue
                process = due.context.get(PROCESS)
                if process is not None:
                    if process.held is not None:
                        process.held.append(due)
                        continue
                    if not process.is_alive:
                        continue
                try:
                    due.context.run(due.call, *due.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - noted
                    text = f"Exception in callback {due.call!r}"
                    self.call_exception_handler({"message": text, "exception": error})
            due = process = None

    def run_in_executor(
        self, executor: object, func: Any, *args: Any
    ) -> asyncio.Future:
        done = self.create_future()
        took_s = self.random.uniform(0.0, self.thread_s)
        self.call_later(
            took_s * self.random.random(), self._run_function, done, took_s, func, args
        )
        return done

    def _run_function(
        self, done: asyncio.Future, took_s: float, func: Any, args: Any
    ) -> None:
        result = None
        error = None
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
        # No one asks for all tasks.
        (_ALL_TASKS, "add", lambda task: None),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)
