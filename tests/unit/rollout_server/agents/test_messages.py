"""Messages as a client sends them back equal those that it was sent, and no others do."""

import pytest
from slipstream.rollout_server.agents.conversations import message_key, reply_keys


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def said(content: object, **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **fields}


def call(
    arguments: object, *, id: str = "c1", name: str = "add", **fields
) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **fields}


RESULT = {"role": "tool", "content": "a", "tool_call_id": "2"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user([text("a")])),
        (said(None), said("")),
        (said(""), {"role": "assistant"}),
        (said("a", tool_calls=[]), said("a")),
        (said("a", refusal=None, audio=None), said("a")),
        (call("{}", content="\n\n"), call("{}")),
        (call("{}", content=[text("\n"), text("a")]), call("{}", content="a")),
        (said(" \n"), said(None)),
        (call('{"b": 1, "a": 2}'), call('{"a":2,"b":1}')),
        (call('{"a": 2}'), call({"a": 2})),
        (call(""), call("{}")),
        (said("a", name="agent"), said("a")),
    ],
)
def test_equal_messages_have_one_key(one, other) -> None:
    assert message_key(one) == message_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), {"role": "system", "content": "a"}),
        (user("a"), user("a ")),
        (user("\n"), user("")),
        (user("a") | {"name": "b"}, user("a")),
        (call("{}", content="\n\na"), call("{}", content="a")),
        (RESULT | {"tool_call_id": "1"}, RESULT),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call('{"a": 1}'), call('{"a": 1}', id="c2")),
        (call('{"a": 1}'), call('{"a": 1}', name="sub")),
        (call('{"a": '), call("{}")),
        (call("[" * 50_000), call("{}")),
        (
            user([{"type": "image_url", "image_url": {"url": "x"}}]),
            user('{"image_url": {"url": "x"}, "type": "image_url"}'),
        ),
        (user([text("a"), text("b")]), user("ab")),
    ],
)
def test_other_messages_have_other_keys(one, other) -> None:
    assert message_key(one) != message_key(other)


def test_a_reply_may_come_back_without_its_reasoning_but_not_with_another() -> None:
    full_key, plain = reply_keys(said("a", reasoning="r"))
    assert message_key(said("a", reasoning="r")) == full_key
    assert message_key(said("a")) == plain
    other = message_key(said("a", reasoning="s"))
    assert other not in (full_key, plain)
