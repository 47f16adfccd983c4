"""Replies as a client saw them, read from the HTTP answers that it was sent.

The form is that in which the client sends a reply back: a chat message, content blocks of
Anthropic's messages, or output items of responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CHAT_PATH = "/v1/chat/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"


def reply_of(path: str, body: bytes, *, is_stream: bool) -> Any | None:  # noqa: ANN401 - JSON
    """Returns the reply in the form of its API; None where the answer was cut off or has none.

    ValueError for a call of a tool whose arguments are no JSON, where the API has them as JSON.
    """
    events = list(_events(body)) if is_stream else [json.loads(body)]
    match path, is_stream:
        case "/v1/chat/completions", False:
            return events[0]["choices"][0]["message"]
        case "/v1/chat/completions", True:
            return _chat_message(events)
        case "/v1/messages", False:
            return events[0]["content"]
        case "/v1/messages", True:
            return _content_blocks(events)
        case "/v1/responses", False:
            return events[0]["output"]
        case _:
            ends = [event for event in events if event.get("type") == "response.completed"]
            return ends[-1]["response"]["output"] if ends else None


def response_id_of(body: bytes, *, is_stream: bool) -> str:
    """Returns the id of a whole answer of /v1/responses."""
    if not is_stream:
        return str(json.loads(body)["id"])
    ends = [event for event in _events(body) if event.get("type") == "response.completed"]
    return str(ends[-1]["response"]["id"])


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            event = json.loads(line[len(b"data: ") :])
            if isinstance(event, dict):
                yield event


def _chat_message(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    content, reasoning, is_whole = "", "", False
    calls: dict[int, dict[str, str]] = {}
    for event in events:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                function = part.get("function") or {}
                call["id"] = call["id"] or part.get("id") or ""
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
            is_whole = is_whole or choice.get("finish_reason") is not None
    if not is_whole:
        return None
    tool_calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for _, call in sorted(calls.items())
    ]
    return {
        "role": "assistant",
        "content": content,
        "reasoning": reasoning or None,
        "tool_calls": tool_calls,
    }


def _content_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    for event in events:
        index = event.get("index")
        if event.get("type") == "content_block_start" and isinstance(index, int):
            blocks[index] = dict(event["content_block"])
        elif event.get("type") == "content_block_delta" and isinstance(index, int):
            delta, block = event["delta"], blocks[index]
            for name in ("text", "thinking"):
                if name in delta:
                    block[name] = (block.get(name) or "") + delta[name]
            inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
    if not events or events[-1].get("type") != "message_stop":
        return None
    for index, text in inputs.items():
        if text:
            blocks[index]["input"] = json.loads(text)
    return [block for _, block in sorted(blocks.items())]
