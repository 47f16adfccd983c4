"""Decoding steps of the engine that cost less than vLLM's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(_: Tables) -> bool:
    """Returns True: the option itself leaves out what an engine cannot do, and says why."""
    return True


EXTENSION = Extension(
    name="fast_decoding",
    is_on=_is_on,
    engine_arguments="slipstream.extensions.fast_decoding.server.arguments:engine_arguments",
    scheduler="slipstream.extensions.fast_decoding.server.chunking_scheduler:scheduler_class",
    disabled_features="slipstream.extensions.fast_decoding.server.arguments:disabled_features",
)
