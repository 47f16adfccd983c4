"""A critic, and references on the ranks of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.needs_reference or bool(config.roles)


EXTENSION = Extension(
    name="other_models",
    is_on=_is_on,
    after=("prefix_sharing",),
    checks="slipstream.extensions.other_models.launch:CHECKS",
    trainer="slipstream.extensions.other_models.trainer:Roles",
)
