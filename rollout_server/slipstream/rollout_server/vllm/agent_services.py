"""Opens, on first use, the parts of vLLM's server that episodes need: most runs need none.

Agents need vLLM's HTTP API; other environments may need vLLM's parsers of replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.rollout_server.agents.agent_api import Answering
from slipstream.rollout_server.chat import TemplateInputs

if TYPE_CHECKING:
    from slipstream.rollout_server.episodes.renderer import Renderer
    from slipstream.rollout_server.vllm.reply_reader import ReplyReader
    from vllm.engine.protocol import EngineClient

Opened = TypeVar("Opened")


class AgentServices:
    """An `AgentApi` of vLLM, which all episodes of a server share."""

    def __init__(
        self, llm: EngineClient | None, renderer: Renderer, settings: RolloutServerSection
    ) -> None:
        """`llm` is None if the engine is not in this process."""
        self._llm = llm
        self._renderer = renderer
        self._settings = settings
        self.takes_tools = settings.tool_parser is not None
        self.reads_thoughts = settings.reasoning_parser is not None
        # The parts that were asked for, by name.
        self._opened: dict[str, asyncio.Future[Any]] = {}

    async def reader(self, inputs: TemplateInputs) -> ReplyReader | None:
        if not inputs.tools and not self.reads_thoughts:
            return None
        reader = await self._once("vLLM's parser of replies", self._open_reader)
        if inputs.tools:
            reader.check(inputs)
        return reader

    async def api(self) -> Answering:
        if self._llm is None:
            raise ConfigError(
                "the environment runs an agent, whose calls need an engine of the server's own: "
                "leave out rollout_server.engine_url"
            )
        return await self._once("vLLM's application for agents", self._open_api)

    def _open_reader(self) -> ReplyReader:
        from slipstream.rollout_server.vllm.reply_reader import ReplyReader

        return ReplyReader(self._llm, self._settings)

    def _open_api(self) -> Answering:
        # To import vLLM's server takes a second.
        from slipstream.rollout_server.vllm.agent_application import open_answering

        return open_answering(self._llm, self._renderer, self._settings)

    async def _once(self, what: str, open_it: Callable[[], Opened]) -> Opened:
        settings = self._settings

        def opened() -> Opened:
            try:
                return open_it()
            except Exception as error:
                # The engine runs, so only the settings that it does not know can be wrong.
                raise ConfigError(
                    f"{what} does not start with rollout_server.tool_parser = "
                    f"{settings.tool_parser!r}, reasoning_parser = {settings.reasoning_parser!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error

        if what not in self._opened:
            self._opened[what] = asyncio.ensure_future(asyncio.to_thread(opened))
        part: Opened = await asyncio.shield(self._opened[what])
        return part
