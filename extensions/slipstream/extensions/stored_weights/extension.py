"""Weights go through storage, from which servers fetch them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.weights.storage_url is not None


EXTENSION = Extension(
    name="stored_weights",
    is_on=_is_on,
    rules="slipstream.extensions.stored_weights.settings:problems",
    process_check="slipstream.extensions.stored_weights.storage:check",
    controller="slipstream.extensions.stored_weights.controller:part",
    writer="slipstream.extensions.stored_weights.trainer:writer",
    server="slipstream.extensions.stored_weights.server:StoredWeightsPart",
)
