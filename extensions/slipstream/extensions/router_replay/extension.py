"""The trainer's routers replay the experts that the engine chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.algorithm.router_replay != "off"


EXTENSION = Extension(
    name="router_replay",
    is_on=_is_on,
    after=("drafts",),
    model="slipstream.extensions.router_replay.trainer:ReplayPart",
    trainer="slipstream.extensions.router_replay.trainer:step_part",
)
