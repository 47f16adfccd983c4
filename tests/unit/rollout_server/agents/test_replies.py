"""Replies are read from HTTP answers in the form in which a client sends them back."""

import json

from slipstream.rollout_server.agents.recorder import (
    CHAT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    reply_of,
)


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def chunk(finish: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def called(index: int, **function: str) -> list[dict[str, object]]:
    return [{"index": index, "function": function}]


def test_a_streamed_message_is_put_together() -> None:
    first = called(0, name="add", arguments="")
    first[0]["id"] = "c0"
    second = called(1, name="sub", arguments='{"b"')
    second[0]["id"] = "c1"
    events = [
        chunk(role="assistant", content=""),
        chunk(reasoning="hm"),
        chunk(content="a\u20ac"),
        chunk(tool_calls=first),
        chunk(tool_calls=called(0, arguments='{"a": 1}')),
        chunk(tool_calls=second),
        chunk("tool_calls", tool_calls=called(1, arguments=": 2}")),
        {"choices": [], "usage": {}},
    ]
    whole = sse(*events) + b"data: [DONE]\n\n"
    message = reply_of(CHAT_PATH, whole, is_stream=True)
    assert message == {
        "role": "assistant",
        "content": "a\u20ac",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "c1", "type": "function", "function": {"name": "sub", "arguments": '{"b": 2}'}},
        ],
    }
    assert reply_of(CHAT_PATH, sse(*events[:6]), is_stream=True) is None


def test_streamed_content_blocks_are_put_together() -> None:
    events = [
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
        {"type": "content_block_delta", "index": 0, "delta": {"thinking": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"text": "a"}},
        {"type": "content_block_delta", "index": 1, "delta": {"text": "b"}},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "c", "name": "add", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"partial_json": '{"a"'}},
        {"type": "content_block_delta", "index": 2, "delta": {"partial_json": ": 1}"}},
        {"type": "message_stop"},
    ]
    assert reply_of(MESSAGES_PATH, sse(*events), is_stream=True) == [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
    ]
    assert reply_of(MESSAGES_PATH, sse(*events[:-1]), is_stream=True) is None


def test_streamed_responses_end_with_the_whole_output() -> None:
    output = [{"type": "message", "content": []}]
    end = {"type": "response.completed", "response": {"output": output}}
    delta = {"type": "response.output_text.delta", "delta": "a"}
    assert reply_of(RESPONSES_PATH, sse(delta, end), is_stream=True) == output
    assert reply_of(RESPONSES_PATH, sse(delta), is_stream=True) is None


def test_an_answer_at_once_has_its_reply() -> None:
    message = {"role": "assistant", "content": "a"}
    chat = json.dumps({"choices": [{"message": message}]}).encode()
    assert reply_of(CHAT_PATH, chat, is_stream=False) == message
    assert reply_of(MESSAGES_PATH, b'{"content": []}', is_stream=False) == []
    assert reply_of(RESPONSES_PATH, b'{"output": []}', is_stream=False) == []
