"""Opens, on first use, the parts of vLLM's server that episodes need: most runs need none.

Agents need vLLM's HTTP API; other environments may need vLLM's parsers of replies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.agents.agent_api import Answering
from slipstream.rollout_server.chat import TemplateInputs

if TYPE_CHECKING:
    from slipstream.rollout_server.vllm.reply_reader import ReplyReader
    from slipstream.rollout_server.vllm.vllm_requests import VllmParts


class AgentServices:
    """An `AgentApi` of vLLM, which all episodes of a server share."""

    def __init__(self, parts: VllmParts, settings: RolloutServerSection) -> None:
        self._parts, self._settings = parts, settings
        self._opening: asyncio.Future[Answering] | None = None
        self._reading: asyncio.Future[ReplyReader] | None = None

    @property
    def takes_tools(self) -> bool:
        return self._settings.tool_parser is not None

    @property
    def reads_thoughts(self) -> bool:
        return self._settings.reasoning_parser is not None

    async def reader(self, inputs: TemplateInputs) -> ReplyReader | None:
        if not inputs.tools and not self.reads_thoughts:
            return None
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._open_reader))
        return await asyncio.shield(self._reading)

    async def api(self) -> Answering:
        if self._opening is None:
            self._opening = asyncio.ensure_future(asyncio.to_thread(self._open))
        return await asyncio.shield(self._opening)

    def _open(self) -> Answering:
        # This imports vLLM's server, which takes a second.
        from slipstream.rollout_server.vllm.agent_application import open_answering

        try:
            return open_answering(self._parts, self._settings)
        except Exception as error:
            raise self._wrong("vLLM's application for agents", error) from error

    def _open_reader(self) -> ReplyReader:
        from slipstream.rollout_server.vllm.reply_reader import ReplyReader

        try:
            return ReplyReader(self._parts, self._settings)
        except Exception as error:
            raise self._wrong("vLLM's parser of replies", error) from error

    def _wrong(self, what: str, error: Exception) -> ConfigError:
        # The engine runs, so only the settings that it does not know can be wrong.
        settings = self._settings
        return ConfigError(
            f"{what} does not start with rollout_server.tool_parser = {settings.tool_parser!r}, "
            f"reasoning_parser = {settings.reasoning_parser!r}: {type(error).__name__}: {error}"
        )
