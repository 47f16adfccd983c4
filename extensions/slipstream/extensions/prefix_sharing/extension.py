"""Prefixes that the episodes of a group share are computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.learner.shared_prefix_tokens > 0


EXTENSION = Extension(
    name="prefix_sharing",
    is_on=_is_on,
    after=("turns",),
    model="slipstream.extensions.prefix_sharing.trainer:SharingPart",
    trainer="slipstream.extensions.prefix_sharing.shared_tokens:step_part",
)
