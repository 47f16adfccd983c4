"""Lines of a process's output as JSON objects, one a line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

# The order of the fields on a line.
FIELDS = ("time", "level", "process", "run", "step", "logger", "message", "exception")
# What an object has that a formatter has made.
MADE = frozenset({"time", "level", "message"})
# Our text form, vLLM's, and that of its processes.
LEVEL = re.compile(
    r"(?:\([^)]*\) )?(?:[\d-]+ [\d:,.]+ )?(?:rank \d+ )?"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)[ :]"
)
TRACEBACK = "Traceback (most recent call last):"
# The beginning of what our programs write for people at their end.
LAST_WORDS = "slipstream: "
# Lines of one traceback that stay together.
MAX_TRACEBACK_LINES = 500


def utc_time(seconds: float) -> str:
    """Returns seconds since 1970 as text, such as 2026-01-31T12:00:00.250Z."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode(fields: dict[str, Any]) -> str:
    """Returns the object on one line, in ASCII, with its fields in order."""
    return json.dumps({name: fields[name] for name in FIELDS if name in fields})


class JsonFormatter(logging.Formatter):
    """Makes one object of each record; a traceback is in its field `exception`.

    A record's own `step` comes before that of the process.
    """

    def __init__(self, process: str, run: str, current_step: Callable[[], int | None]) -> None:
        super().__init__()
        self._process = process
        self._run = run
        self._current_step = current_step

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": utc_time(record.created),
            "level": record.levelname,
            "process": self._process,
            "run": self._run,
            "logger": record.name,
            "message": record.getMessage(),
        }
        step = getattr(record, "step", None) or self._current_step()
        if step is not None:
            fields["step"] = step
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return encode(fields)


def as_objects(
    lines: Iterable[str], process: str, run: str, now: Callable[[], float]
) -> Iterator[str]:
    """Yields objects for lines of output; those that a formatter made keep their fields.

    The lines of a printed traceback are one object. `now` gives seconds since 1970.
    """

    def plain(text: str, level: str) -> str:
        return encode(
            {
                "time": utc_time(now()),
                "level": level,
                "process": process,
                "run": run,
                "message": text,
            }
        )

    traceback: list[str] = []
    for line in lines:
        text = line.rstrip("\r\n")
        if traceback:
            traceback.append(text)
            goes_on = not text or text[0].isspace()
            if goes_on and len(traceback) < MAX_TRACEBACK_LINES:
                continue
            yield plain("\n".join(traceback), "ERROR")
            traceback.clear()
        elif text.startswith(TRACEBACK):
            traceback.append(text)
        elif (fields := _made(text)) is not None:
            yield encode({"process": process, "run": run} | fields)
        elif text:
            match = LEVEL.match(text)
            level = match["level"] if match else "INFO"
            yield plain(text, "ERROR" if text.startswith(LAST_WORDS) else level)
    if traceback:
        yield plain("\n".join(traceback), "ERROR")


def _made(text: str) -> dict[str, Any] | None:
    """Returns the fields of an object that a formatter has made, or None for other text."""
    if not text.startswith("{"):
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    is_made = isinstance(fields, dict) and MADE <= fields.keys() <= set(FIELDS)
    return fields if is_made else None
