"""Engines rest while a learner on their GPU trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.controller.turns != "off"


EXTENSION = Extension(
    name="turns",
    is_on=_is_on,
    after=("profiles",),
    controller="slipstream.extensions.turns.controller:part",
    trainer="slipstream.extensions.turns.trainer:step_part",
)
