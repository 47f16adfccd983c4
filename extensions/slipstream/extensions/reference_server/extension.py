"""A server answers for the reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.reference is not None and config.reference.server is not None


EXTENSION = Extension(
    name="reference_server",
    is_on=_is_on,
    server="slipstream.extensions.reference_server.server:ReferencePart",
)
