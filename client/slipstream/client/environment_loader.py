"""Loads an environment from "package.module:Class", and finds which line of its code is running.

`CallTracker` records which calls a worker is answering. Consumes: the begin and end of each call.
Produces: a `RunningCalls`, which the server reads when the worker has ended or no longer answers.
Waits for: the begin of a call; the tracker waits in a thread of its own, since the worker's event
loop may be blocked. Unblocked by: the next call.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import re
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

from slipstream.client.environment import AnyEnvironment, Environment
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.protocol.running_calls import RunningCalls
from slipstream.v1 import trajectory_pb2

MAX_CAUSE_CHARACTERS = 500
# Characters that leave room for the place of an error.
MAX_TEXT_CHARACTERS = 350
# Seconds between two looks at the line that is running; a recorded line may be as old.
_LOOK_PERIOD_S = 0.2

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
# The folders of our package, which lie in one of a library if they are installed.
_OURS = tuple(f"{folder}/" for folder in sys.modules["slipstream"].__path__)
_BUILTIN = tuple(f"{folder}environments/" for folder in _OURS)


def environment_failed(cause: str) -> EnvironmentFailed:
    """Returns an error that blames the environment; `cause` becomes one line of limited length."""
    # Addresses of objects would make each cause another one. Names of files may hold what no
    # message can carry.
    cause = re.sub(r" at 0x[0-9a-f]+(?=>|\.{3})", "", cause)
    line = " ".join(cause.encode(errors="backslashreplace").decode().split())
    if len(line) > MAX_CAUSE_CHARACTERS:
        line = line[: MAX_CAUSE_CHARACTERS - 3] + "..."
    return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, line)


def describe(error: BaseException) -> str:
    """Returns type and message of an exception and the line that raised it, as one line of text."""
    if isinstance(error, BaseExceptionGroup):
        # The text of a group names none of its errors.
        first, *further = error.exceptions
        # An error that was never raised has no place of its own.
        first.__traceback__ = first.__traceback__ or error.__traceback__
        return f"{describe(first)}{f' and {len(further)} more' if further else ''}"
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        # Python says that a coroutine has raised it, and not where.
        error = error.__cause__
    try:
        text = str(error).strip().split("\n", 1)[0][:MAX_TEXT_CHARACTERS]
    except BaseException as broken:  # noqa: BLE001 - told in its place
        text = f"its text cannot be made: {type(broken).__name__}"
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # The traceback ends where Python reads modules, not at the mistake.
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    walk = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code, number) for frame, number in walk][::-1]
    files = [code.co_filename for code, _ in frames]
    if not files or (is_ours(files[0]) and not any(map(is_of_environment, files))):
        return line
    return f"{line} ({_describe(frames)})"


def load_environment(reference: str, args_json: str, search_path: str) -> AnyEnvironment:
    """Imports the class `reference` and makes an instance with the JSON object `args_json`.

    Raises EnvironmentFailed with the cause if that fails. `search_path` is put before Python's own
    path and stays there: the environment may import more modules later.
    """
    module_name, colon, class_name = reference.partition(":")
    if not (module_name and colon and class_name):
        raise environment_failed(f"a reference is package.module:Class, got {reference!r}")
    if search_path and search_path not in sys.path:
        sys.path.insert(0, search_path)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        cause = _import_cause(error, module_name, class_name, search_path)
        raise environment_failed(cause) from error
    environment_class = vars(module).get(class_name)
    if environment_class is None:
        raise environment_failed(f"module {module_name} has no class {class_name}")
    if not (isinstance(environment_class, type) and issubclass(environment_class, Environment)):
        raise environment_failed(f"{reference} is no subclass of slipstream.client.Environment")
    try:
        args = json.loads(args_json or "{}")
    except (ValueError, RecursionError) as error:
        raise environment_failed(f"the arguments are not JSON: {error}") from error
    if not isinstance(args, dict):
        raise environment_failed(f"the arguments must be a JSON object, got {args_json}")
    try:
        # A compiled class may tell none.
        with contextlib.suppress(ValueError):
            signature = inspect.signature(environment_class)
            signature.bind(**args)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        raise environment_failed(f"{class_name}(...): {error}; it takes {names}") from error
    try:
        return environment_class(**args)
    except ConfigError as error:
        # A ConfigError says everything itself.
        raise environment_failed(str(error)) from error
    except BaseException as error:
        raise environment_failed(f"{class_name}(...) failed: {describe(error)}") from error


def _import_cause(error: BaseException, module_name: str, class_name: str, search_path: str) -> str:
    """Returns why a module cannot be imported, and of a missing one where it was looked for."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module_name}.".startswith(f"{missing}."):
        return f"import of {module_name} failed: {describe(error)}"
    # The search path may be a text that no path can be.
    is_there = os.path.isdir(search_path)  # noqa: PTH112
    folder = search_path if is_there else f"{search_path}, which is no folder here,"
    where = f"{folder} or " if search_path else ""
    cause = f"there is no module {missing!r} in {where}Python's path"
    if module_name.endswith(".py"):
        cause += f"; without .py: {module_name.removesuffix('.py')}:{class_name}"
    return cause


def is_ours(filename: str) -> bool:
    """Whether a source file belongs to us, and to no built-in environment."""
    return filename.startswith(_OURS) and not filename.startswith(_BUILTIN)


def is_of_environment(filename: str) -> bool:
    """Whether a file belongs to an environment: not to Python, a library or us."""
    is_foreign = filename.startswith((*_LIBRARIES, "<")) or is_ours(filename)
    return filename.startswith(_BUILTIN) or not is_foreign


class CallTracker:
    """Writes a worker's `RunningCalls` to a descriptor; create it in the event loop's thread."""

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
        """Records that `task` begins to answer a call of the episode `key`."""
        with self._lock:
            self._keys[task] = key
            RunningCalls(tuple(self._keys.values())).write(self._descriptor)
        self._busy.set()

    def end(self, task: asyncio.Task[object]) -> None:
        """Records that `task` has answered its call."""
        with self._lock:
            del self._keys[task]
            RunningCalls(tuple(self._keys.values())).write(self._descriptor)
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
                    record = RunningCalls(tuple(self._keys.values()), current, place)
                    record.write(self._descriptor)


def running_place(thread: int) -> str:
    """Returns file, line and function of the code that the thread with the id `thread` executes."""
    walk = traceback.walk_stack(sys._current_frames()[thread])
    return _describe([(frame.f_code, line) for frame, line in walk])


def awaited_place(task: asyncio.Task[object]) -> str:
    """Returns file, line and function where `task` waits, or "" if its frames cannot be read."""
    frames: list[tuple[types.CodeType, int]] = []
    coroutine: object = task.get_coro()
    while isinstance(coroutine, types.CoroutineType) and coroutine.cr_frame is not None:
        frames.insert(0, (coroutine.cr_code, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return _describe(frames)


def _describe(frames: Sequence[tuple[types.CodeType, int]]) -> str:
    """Returns the first frame of an environment, a library's or any; the innermost comes first."""
    # A library that the environment called says less than the line that called it.
    environment_frames = [frame for frame in frames if is_of_environment(frame[0].co_filename)]
    library_frames = [frame for frame in frames if not is_ours(frame[0].co_filename)]
    for code, line in (environment_frames or library_frames or frames)[:1]:
        return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
    return ""
