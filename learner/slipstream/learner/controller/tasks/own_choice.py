"""A user's class that chooses the tasks of an environment, and the limits of each choice.

Waits for: the class. Unblocked by: its answer, or `limit_s`, where the main thread asks.
"""

from __future__ import annotations

import importlib
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.core.errors import ConfigError
from slipstream.core.settings.curriculum_section import CurriculumSection
from slipstream.core.task_view import TaskView

if TYPE_CHECKING:
    from _typeshed import TraceFunction

# Seconds of one choice: meanwhile the controller does nothing else.
LIMIT_S = 1.0
# Seconds between two interruptions of a class that goes on behind its limit.
_AGAIN_S = 0.1
_MAX_CHARACTERS = 300

_Value = TypeVar("_Value")


class ChoiceFailed(Exception):
    """A user's class made no choice; the message says why, in one line."""


class _TooLong(BaseException):
    """Raised in a class that takes too long; no `except Exception` of its own stops it."""


class OwnChoice:
    """An instance of the class that `curriculum.chooser` names."""

    def __init__(
        self, settings: CurriculumSection, *, search_path: str, limit_s: float = LIMIT_S
    ) -> None:
        """Imports the class, also from the folder `search_path`; ConfigError when it fails."""
        assert settings.chooser is not None, "another rule has no class"
        self._name, self._limit_s = settings.chooser, limit_s
        module_name, _, class_name = settings.chooser.partition(":")
        self._module_name = module_name
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        try:
            found = getattr(importlib.import_module(module_name), class_name)
            self._chooser: Any = found(**settings.args)
            is_chooser = callable(getattr(self._chooser, "choose", None))
        except BaseException as error:  # noqa: BLE001 - code of the user
            raise ConfigError(f"curriculum.chooser {self._name}: {self._line(error)}") from None
        if not is_chooser:
            raise ConfigError(f"curriculum.chooser {self._name} must have a method choose(tasks)")

    def choose(self, tasks: TaskView) -> int:
        """Returns the index of the next task; ChoiceFailed where the class gives none."""
        try:
            found = _within(self._limit_s, lambda: self._chooser.choose(tasks))
        except BaseException as error:  # noqa: BLE001 - code of the user
            raise ChoiceFailed(f"{self._name} failed: {self._line(error)}") from None
        # Methods of the found object are code of the user too: none is called here.
        kind = type(found)
        if kind is not bool and issubclass(kind, int):
            index = int.__int__(found)
            if 0 <= index < tasks.num_tasks:
                return index
        try:
            shown = _within(self._limit_s, lambda: reprlib.repr(found))
        except BaseException:  # noqa: BLE001 - code of the user
            shown = f"an object of type {kind.__name__}"
        raise ChoiceFailed(
            f"{self._name} must choose a task from 0 to {tasks.num_tasks - 1}, got {shown}"
        )

    def _line(self, error: BaseException) -> str:
        """Returns type, message and place in the class's file of an exception, in one line."""
        try:
            said = _within(self._limit_s, lambda: " ".join(str(error).split()))
        except BaseException:  # noqa: BLE001 - code of the user
            said = ""
        kinds = [] if isinstance(error, _TooLong) else [type(error).__name__]
        line = ": ".join([*kinds, *([said] if said else [])])
        file = getattr(sys.modules.get(self._module_name), "__file__", None)
        own = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
        where = (
            f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
        )
        return line[:_MAX_CHARACTERS] + where


def own_choices(
    curricula: Mapping[str, CurriculumSection], *, search_path: str
) -> dict[str, OwnChoice]:
    """Makes the instance of each environment whose rule is its own; ConfigError names the first."""
    made = {}
    for name, settings in curricula.items():
        if settings.rule == "own":
            try:
                made[name] = OwnChoice(settings, search_path=search_path)
            except ConfigError as error:
                raise ConfigError(f"environment {name}: {error}") from error
    return made


def _within(limit_s: float, code: Callable[[], _Value]) -> _Value:
    """Returns the result of a user's code; only the main thread can end what takes longer.

    Then it raises _TooLong there, again and again, also where `code` catches everything.
    """
    if threading.current_thread() is not threading.main_thread():
        return code()
    running, said = True, f"a choice must take at most {limit_s:g} s"

    def again(_: FrameType, event: str, __: object) -> TraceFunction:
        if event == "line":
            raise _TooLong(said)
        return again

    def end(_: int, frame: FrameType | None) -> None:
        if running:
            # Also at the next line, where an `except` that has caught it does not catch it again.
            sys.settrace(again)
            while frame is not None and frame.f_code is not _within.__code__:
                frame.f_trace, frame = again, frame.f_back
            raise _TooLong(said)

    before, traced = signal.signal(signal.SIGALRM, end), sys.gettrace()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
            return code()
        finally:
            running = False
    finally:
        # An alarm between these lines has raised behind the inner one; the next is far off.
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.settrace(traced)
        signal.signal(signal.SIGALRM, before)
