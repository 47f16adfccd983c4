"""Records which calls a worker answers, and where its code is.

Consumes: the begin and end of each call. Produces: a `CallRecord`, which the server reads when the
worker has ended or no longer answers. Waits for: a call, on a thread, since the worker's own loop
may be blocked. Unblocked by: the next call.
"""

import asyncio
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path

from slipstream.client.environment_loader import is_of_environment
from slipstream.protocol.call_record import CallRecord

# Seconds between two looks at the place in the code, which may be as old.
_LOOK_PERIOD_S = 0.2


class CallTracker:
    """Writes the record of one worker; create it in the thread of the worker's event loop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        # The loop's thread and the tracker's thread both write.
        self._lock = threading.Lock()
        self._keys: dict[asyncio.Task[object], str] = {}
        self._busy = threading.Event()
        threading.Thread(target=self._watch, name="call-tracker", daemon=True).start()

    def begin(self, key: str, task: asyncio.Task[object]) -> None:
        """Notes that `task` begins to answer a call of the episode `key`."""
        with self._lock:
            self._keys[task] = key
            CallRecord(tuple(self._keys.values())).write(self._descriptor)
        self._busy.set()

    def end(self, task: asyncio.Task[object]) -> None:
        """Notes that the call of `task` is answered."""
        with self._lock:
            del self._keys[task]
            CallRecord(tuple(self._keys.values())).write(self._descriptor)
            if not self._keys:
                self._busy.clear()

    def _watch(self) -> None:
        pause = threading.Event()
        while self._busy.wait():
            pause.wait(_LOOK_PERIOD_S)
            with self._lock:
                task = asyncio.current_task(self._loop)
                current = self._keys.get(task, "") if task is not None else ""
                if current:
                    place = running_place(self._loop_thread)
                    record = CallRecord(tuple(self._keys.values()), current, place)
                    record.write(self._descriptor)


def running_place(thread: int) -> str:
    """Returns where the code of a thread is."""
    frames = []
    frame: types.FrameType | None = sys._current_frames()[thread]
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _describe(frames)


def awaited_place(task: asyncio.Task[object]) -> str:
    """Returns where `task` waits, or "" if Python cannot look into its coroutine."""
    frames: list[tuple[types.CodeType, int]] = []
    coroutine: object = task.get_coro()
    while isinstance(coroutine, types.CoroutineType) and coroutine.cr_frame is not None:
        frames.insert(0, (coroutine.cr_code, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return _describe(frames)


def _describe(frames: Sequence[tuple[types.CodeType, int]]) -> str:
    """Returns file, line and function of the innermost frame, of an environment's if there is one.

    `frames` begins with the innermost one.
    """
    own = [frame for frame in frames if is_of_environment(frame[0].co_filename)]
    for code, line in (own or frames)[:1]:
        return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
    return ""
