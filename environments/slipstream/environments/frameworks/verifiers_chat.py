"""A harness of verifiers that chats in the worker's own process.

verifiers' `null` harness does the same, but in a program that `uv run` starts for each episode
after downloading packages. Tools of a taskset are called over MCP by verifiers' own client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any, TypeAlias

import openai
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

# An object of verifiers, whose types are not read here.
Foreign: TypeAlias = Any

# Seconds of one reply. A busy engine may take long, and the episode has limits of its own.
REPLY_LIMIT_S = 3600.0
ENDED = ProgramResult(exit_code=0, stdout="", stderr="")


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """Requests replies and runs their tool calls, until a reply has none or is cut."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @cached_property
    def _client(self) -> openai.AsyncOpenAI:
        # All episodes share one client, since making a client takes longer than a call.
        return openai.AsyncOpenAI(api_key="of no episode", base_url="http://127.0.0.1")

    async def launch(
        self,
        ctx: Foreign,
        trace: Foreign,
        runtime: Foreign,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Foreign,
    ) -> Foreign:
        """Requests replies and runs their tool calls, until a reply has none or is cut.

        The chat also ends, without an error, when the context is full. Other errors of the API are
        raised.
        """
        client = self._client.with_options(base_url=endpoint, api_key=secret, timeout=REPLY_LIMIT_S)
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        limit_s = self.config.tool_timeout
        urls = {name: {"url": url, "timeout": limit_s} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": urls}, stack)

            async def call(name: str, text: str) -> Foreign:
                """Returns a tool's result, or an error for the model."""
                try:
                    arguments = json.loads(text)
                except (ValueError, RecursionError) as error:
                    return f"error: invalid JSON in tool arguments ({error})"
                if not isinstance(arguments, dict):
                    return "error: tool arguments must be a JSON object"
                if name not in dispatch:
                    return f"error: unknown tool {name!r}"
                return await call_mcp(servers, dispatch, name, arguments)

            offered = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(
                        model=ctx.model, messages=messages, **offered
                    )
                except openai.APIStatusError as error:
                    if is_context_overflow(error):
                        return ENDED
                    raise
                (choice,) = answer.choices
                reply = choice.message
                messages.append(reply.model_dump(exclude_none=True))
                # A reply that a limit cut is not whole: none of its calls is run.
                if choice.finish_reason == "length" or not reply.tool_calls:
                    return ENDED
                for tool_call in reply.tool_calls:
                    content = await call(
                        tool_call.function.name, tool_call.function.arguments or "{}"
                    )
                    result = {"role": "tool", "tool_call_id": tool_call.id, "content": content}
                    result["name"] = tool_call.function.name
                    messages.append(bound_tool_message(result))
