"""Servers answer for reference models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Program

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.reference is not None and bool(config.reference.servers)


EXTENSION = Extension(
    name="reference_server",
    is_on=_is_on,
    after=("redis",),
    checks="slipstream.extensions.reference_server.launch:CHECKS",
    programs={
        "check-reference": Program(
            "reference check",
            "slipstream.extensions.reference_server.server",
            restarts=0,
        ),
    },
    server="slipstream.extensions.reference_server.server:ReferencePart",
)
