"""A user's class that chooses the tasks of an environment, and the limits of each choice.

Waits for: the class. Unblocked by: its answer, or `limit_s`, where the main thread asks.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.settings.curriculum_section import CurriculumSection
from slipstream.core.task_view import TaskView

# Seconds of one choice: meanwhile the controller does nothing else.
LIMIT_S = 1.0
_MAX_CHARACTERS = 300


class ChoiceFailed(Exception):
    """A user's class made no choice; the message says why, in one line."""


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
        except (Exception, SystemExit) as error:
            raise ConfigError(f"curriculum.chooser {self._name}: {self._line(error)}") from error
        if not callable(getattr(self._chooser, "choose", None)):
            raise ConfigError(f"curriculum.chooser {self._name} must have a method choose(tasks)")

    def choose(self, tasks: TaskView) -> int:
        """Returns the index of the next task; ChoiceFailed where the class gives none."""
        try:
            with _within(self._limit_s):
                found = self._chooser.choose(tasks)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise ChoiceFailed(f"{self._name} failed: {self._line(error)}") from error
        is_index = isinstance(found, int) and not isinstance(found, bool)
        if not is_index or not 0 <= found < tasks.num_tasks:
            raise ChoiceFailed(
                f"{self._name} must choose a task from 0 to {tasks.num_tasks - 1}, got {found!r}"
            )
        return int(found)

    def _line(self, error: BaseException) -> str:
        """Returns type, message and place in the class's file of an exception, in one line."""
        said = " ".join(str(error).split())
        line = f"{type(error).__name__}: {said}" if said else type(error).__name__
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


@contextlib.contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raises TimeoutError in a block that lasts longer; only the main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"a choice must take at most {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
