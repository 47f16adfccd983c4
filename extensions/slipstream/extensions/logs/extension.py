"""Logs as JSON, a line for each record, and logs of a bounded size."""

from __future__ import annotations

from slipstream.core.extension import Extension

EXTENSION = Extension(
    name="logs",
    tables={"logging": "slipstream.extensions.logs.settings:LoggingSection"},
    log_formatter="slipstream.extensions.logs.launch:formatter",
    log_writer="slipstream.extensions.logs.launch:writer_command",
)
