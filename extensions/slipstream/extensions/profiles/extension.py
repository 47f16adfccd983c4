"""A window of steps under torch's profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.debug.profile.start_step is not None


EXTENSION = Extension(
    name="profiles",
    is_on=_is_on,
    trainer="slipstream.extensions.profiles.trainer:step_part",
)
