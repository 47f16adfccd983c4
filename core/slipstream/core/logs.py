"""The form of log lines, the step that a process is at, and the program that writes its log.

Without an option that changes them, lines are text and a process writes its log itself.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.extension import active, resolve

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables

# The newest step of this process.
_steps: list[int] = []


def note_step(step: int) -> None:
    """Says which step this process is at from now on; lines of other threads have it too."""
    _steps[:] = [step]


def current_step() -> int | None:
    """Returns the step of the last `note_step`, or None before the first."""
    return _steps[0] if _steps else None


def formatter(config: "Tables", process: str) -> logging.Formatter | None:
    """Returns the form of lines that the settings ask for, or None for the usual text."""
    for manifest in active(config):
        if manifest.log_formatter:
            form: logging.Formatter | None = resolve(manifest.log_formatter)(config, process)
            if form is not None:
                return form
    return None


def use_format(config: "Tables", process: str) -> None:
    """Gives the root logger's handlers of this process the form that the settings ask for."""
    if (form := formatter(config, process)) is not None:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(form)


def writer_command(config: "Tables", process: str, path: Path) -> Sequence[str]:
    """Returns the command of a program that reads a process's output and writes its log, or ()."""
    for manifest in active(config):
        if manifest.log_writer:
            command: Sequence[str] = resolve(manifest.log_writer)(config, process, path)
            return command
    return ()


def as_text(line: str) -> str:
    """Returns a line of a log as its text form: that of a JSON object with `message`, or itself."""
    if not line.startswith("{"):
        return line
    try:
        fields = json.loads(line)
        message = fields["message"]
    except (ValueError, KeyError, TypeError):
        return line
    if "logger" not in fields:
        return str(message)
    lines = [f"{fields.get('time')} {fields.get('level')} {fields['logger']}: {message}"]
    if "exception" in fields:
        lines.append(fields["exception"])
    return "\n".join(lines)
