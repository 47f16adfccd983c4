"""State of the trainer that moves to the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return any(config.learner.offload.model_dump().values())


EXTENSION = Extension(
    name="offload",
    is_on=_is_on,
    model="slipstream.extensions.offload.trainer:OffloadPart",
)
