"""Rounds of episodes that are measured and never trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return bool(config.evaluations)


EXTENSION = Extension(
    name="evaluation",
    is_on=_is_on,
    controller="slipstream.extensions.evaluation.controller:part",
    precedes_publisher=True,
)
