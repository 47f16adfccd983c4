"""Agents whose worker, server or controller was lost go on at the call where they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.agents.recover


EXTENSION = Extension(
    name="agent_recovery",
    is_on=_is_on,
    title="agents.recover",
    rules="slipstream.extensions.agent_recovery.settings:problems",
    controller="slipstream.extensions.agent_recovery.controller:part",
    server="slipstream.extensions.agent_recovery.server:RecoveryPart",
)
