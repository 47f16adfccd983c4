"""Opens the HTTP API of agents when the first agent comes: runs without agents need none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import RolloutServerSection
from slipstream.rollout_server.agents.answering import Answering
from slipstream.rollout_server.agents.recorder import AsMessages
from slipstream.rollout_server.engine_interface import Engine


@dataclass(frozen=True)
class AgentApi:
    """What agents' episodes need of vLLM."""

    answering: Answering
    as_messages: AsMessages


class Agents:
    """The API of agents on one server; all episodes share it."""

    def __init__(self, engine: Engine, settings: RolloutServerSection) -> None:
        self._engine = engine
        self._settings = settings
        self._opening: asyncio.Future[AgentApi] | None = None

    async def api(self) -> AgentApi:
        """Returns the API; the first call opens it, in a thread. ConfigError: it does not start."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        return await asyncio.shield(self._opening)

    def _open(self) -> AgentApi:
        # These import vLLM's server, which takes a second.
        from slipstream.rollout_server.agents.application import MODEL, open_application
        from slipstream.rollout_server.agents.prompting import CURRENT
        from slipstream.rollout_server.agents.replies_as_messages import as_messages

        try:
            application: Callable[..., Any] = open_application(
                self._engine.vllm_parts, self._settings
            )
        except Exception as error:
            # The engine runs, so only the settings that it does not know can be wrong.
            settings = self._settings
            raise ConfigError(
                f"vLLM's application for agents does not start with rollout_server.tool_parser = "
                f"{settings.tool_parser!r}, reasoning_parser = {settings.reasoning_parser!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        has_tools = self._settings.tool_parser is not None
        return AgentApi(
            Answering(application, CURRENT, model=MODEL, has_tools=has_tools), as_messages
        )
