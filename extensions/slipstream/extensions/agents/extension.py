"""Agents beyond their rollout host reach the model by one port of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.agents.listen is not None


EXTENSION = Extension(
    name="agents",
    is_on=_is_on,
    rules="slipstream.extensions.agents.settings:problems",
    checks="slipstream.extensions.agents.launch:CHECKS",
    server="slipstream.extensions.agents.server:AgentsPart",
)
