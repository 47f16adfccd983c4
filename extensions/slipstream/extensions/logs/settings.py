"""The table `logging`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from slipstream.core.settings.section import Section


class LoggingSection(Section):
    """The form and the size of the logs of controller, trainer ranks and servers.

    Without the table they are text, and grow with the run. With it each log has a small process
    that writes it. Output of environments has [bounds](guides/environment-runs.md) of its own.
    """

    # With `json` each line is an object with `time`, `level`, `process`, `run`, `message` and,
    # where it is known, `step`. The command's own lines on the terminal are such objects too.
    format: Literal["text", "json"] = "text"
    # Size of a log, after which it is moved to NAME.log.1 and a new one begins.
    max_mib: float = Field(64.0, ge=0.01)
    # How many of the logs that were moved are kept, the oldest as NAME.log.NUMBER.
    moved_logs: int = Field(4, ge=1, le=1000)
