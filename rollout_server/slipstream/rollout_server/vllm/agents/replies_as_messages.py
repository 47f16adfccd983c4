"""Replies in the form of each API, as vLLM itself turns them into chat messages."""

from __future__ import annotations

from typing import Any

from slipstream.rollout_server.agents.replies import MESSAGES_PATH, RESPONSES_PATH
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages


def as_messages(path: str, reply: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Returns the chat messages that vLLM makes of `reply` when a client sends it back."""
    if path == MESSAGES_PATH:
        request = AnthropicMessagesRequest(
            model="policy", max_tokens=1, messages=[{"role": "assistant", "content": reply}]
        )
        messages: list[dict[str, Any]] = []
        AnthropicServingMessages._convert_messages(request.messages, messages)
        return messages
    if path == RESPONSES_PATH:
        items = ResponsesRequest(input=reply).input
        return list(construct_input_messages(request_input=items))
    return [reply]
