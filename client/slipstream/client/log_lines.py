"""Lines of a command as entries of a log, where a program collects them."""

import logging

# The form of all lines of this process; none for people.
_formatters: list[logging.Formatter] = []


def speak_by(formatter: logging.Formatter | None) -> None:
    """Gives all further lines of this process the form of log lines, or that for people."""
    _formatters.clear()
    if formatter is not None:
        _formatters.append(formatter)


def record(text: str, level: int = logging.INFO, *, step: int = 0) -> str | None:
    """Returns the line that stands for `text`, or None where lines are for people.

    Step 0 means no step.
    """
    if not _formatters:
        return None
    fields = {
        "name": "slipstream",
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": text,
        "step": step or None,
    }
    return _formatters[0].format(logging.makeLogRecord(fields))
