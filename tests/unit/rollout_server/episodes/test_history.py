from __future__ import annotations

import pytest
from slipstream.protocol.errors import EnvironmentFailed
from slipstream.rollout_server.chat import NO_INPUTS, ChatMessage, ParsedReply, ToolCall
from slipstream.rollout_server.episodes.history import History

EOS = 2


def test_turns_are_appended_and_can_be_read_as_a_whole(renderer) -> None:
    history = History(renderer, [ChatMessage("user", " a ")], NO_INPUTS)
    assert renderer.decode_all(history.prompt()) == "<s> a <reply>"
    history.add(ChatMessage("assistant", " b "), [ChatMessage("user", " c ")])
    assert renderer.decode_all(history.continuation(EOS)) == "c <reply>"
    history.add(ChatMessage("assistant", " d "), [ChatMessage("user", " e ")])
    assert renderer.decode_all(history.continuation(17)) == "</s> e <reply>"
    whole = "<s> a b </s> c d </s> e <reply>"
    assert renderer.decode_all(history.prompt()) == whole


def test_an_assistants_message_of_the_environment_is_no_reply(renderer) -> None:
    shown = [
        ChatMessage("user", " a "),
        ChatMessage("assistant", " b "),
        ChatMessage("user", " c "),
    ]
    history = History(renderer, shown, NO_INPUTS)
    history.add(ChatMessage("assistant", " d "), [ChatMessage("user", " e ")])
    assert renderer.decode_all(history.prompt()) == "<s> a b </s> c d </s> e <reply>"


def test_a_result_may_answer_any_call_of_the_episode_and_no_other(renderer) -> None:
    history = History(renderer, [ChatMessage("user", "a")], NO_INPUTS)
    calls = (ToolCall("one", "add", "{}"), ToolCall("two", "add", "{}"))
    history.add(ParsedReply("b", tool_calls=calls).message, [ChatMessage("tool", "c", "two")])
    history.add(ChatMessage("assistant", "b"), [ChatMessage("tool", "c", "one")])
    with pytest.raises(EnvironmentFailed, match="must be the id of a call of the model, got 'on'"):
        history.add(ChatMessage("assistant", "b"), [ChatMessage("tool", "c", "on")])
