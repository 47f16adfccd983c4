"""What processes and their launcher ask of the option."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.logs import current_step
from slipstream.extensions.logs.lines import JsonFormatter
from slipstream.extensions.logs.settings import LoggingSection

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables

WRITER = "slipstream.extensions.logs.writer"


def formatter(config: Tables, process: str) -> JsonFormatter | None:
    """Returns the form of the process's lines, or None for text."""
    if _section(config).format == "text":
        return None
    return JsonFormatter(process, config.run.name, current_step)


def writer_command(config: Tables, process: str, path: Path) -> Sequence[str]:
    """Returns the command of the program that writes the process's log."""
    section = _section(config)
    command = [sys.executable, "-m", WRITER, str(path)]
    command.append(f"--max-bytes={int(section.max_mib * (1 << 20))}")
    command.append(f"--moved-logs={section.moved_logs}")
    if section.format == "json":
        command += [f"--process={process}", f"--run={config.run.name}"]
    return command


def _section(config: Tables) -> LoggingSection:
    section = config.top_table("logging", LoggingSection)
    assert section is not None, "the option is on where the table is"
    return section
