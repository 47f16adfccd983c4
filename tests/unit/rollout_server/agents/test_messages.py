"""Messages as a client sends them back equal those that it was sent, and no others do."""

import pytest
from slipstream.rollout_server.agents.conversations import message_key, reply_keys


def call(arguments: object, *, id: str = "c1", name: str = "add") -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": ""}, {"role": "assistant"}),
        (
            {"role": "assistant", "content": "a", "tool_calls": []},
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "content": "a", "refusal": None, "audio": None},
            {"role": "assistant", "content": "a"},
        ),
        ({**call("{}"), "content": "\n\n"}, call("{}")),
        (
            {
                **call("{}"),
                "content": [{"type": "text", "text": "\n"}, {"type": "text", "text": "a"}],
            },
            {**call("{}"), "content": "a"},
        ),
        ({"role": "assistant", "content": " \n"}, {"role": "assistant", "content": None}),
        (call('{"b": 1, "a": 2}'), call('{"a":2,"b":1}')),
        (call('{"a": 2}'), call({"a": 2})),
        (call(""), call("{}")),
    ],
)
def test_equal_messages_have_one_key(one, other) -> None:
    assert message_key(one) == message_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "\n"}, {"role": "user", "content": ""}),
        ({**call("{}"), "content": "\n\na"}, {**call("{}"), "content": "a"}),
        (
            {"role": "tool", "content": "a", "tool_call_id": "1"},
            {"role": "tool", "content": "a", "tool_call_id": "2"},
        ),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call('{"a": 1}'), call('{"a": 1}', id="c2")),
        (call('{"a": 1}'), call('{"a": 1}', name="sub")),
        (call('{"a": '), call("{}")),
        (call("[" * 50_000), call("{}")),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "user", "content": '{"image_url": {"url": "x"}, "type": "image_url"}'},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": "ab"},
        ),
    ],
)
def test_other_messages_have_other_keys(one, other) -> None:
    assert message_key(one) != message_key(other)


def test_a_reply_may_come_back_without_its_reasoning_but_not_with_another() -> None:
    ((whole, plain),) = reply_keys([{"role": "assistant", "content": "a", "reasoning": "r"}])
    assert message_key({"role": "assistant", "content": "a", "reasoning": "r"}) == whole
    assert message_key({"role": "assistant", "content": "a"}) == plain
    other = message_key({"role": "assistant", "content": "a", "reasoning": "s"})
    assert other not in (whole, plain)
