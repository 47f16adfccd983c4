"""The learner computes with the engine's bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.algorithm.agreement == "bits"


EXTENSION = Extension(
    name="engine_bits",
    is_on=_is_on,
    model="slipstream.extensions.engine_bits.trainer:BitsPart",
    layers="slipstream.extensions.engine_bits.trainer:layer_parts",
    engine_arguments="slipstream.extensions.engine_bits.arguments:engine_arguments",
)
