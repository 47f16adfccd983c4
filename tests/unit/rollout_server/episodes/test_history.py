import json

import pytest
from slipstream.client.conversion import observation, read_message
from slipstream.client.environment import Environment, ToolCall
from slipstream.core.errors import EnvironmentFailed
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.rollout_server.chat import (
    NO_INPUTS,
    ChatMessage,
    ParsedReply,
    ParsedToolCall,
    TemplateInputs,
)
from slipstream.rollout_server.episodes.environment_talk import History
from slipstream.rollout_server.episodes.renderer import Renderer

EOS = 2
# Like gpt-oss: results without a call before them are refused.
DEMANDING = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}{{ m.content }} {% endfor %}"
)


def test_turns_are_appended_and_can_be_read_as_a_whole(renderer) -> None:
    history = History(renderer, [ChatMessage("user", " a ")], NO_INPUTS)
    assert renderer.decode_all(history.prompt()) == "<s> a <reply>"
    history.add(ChatMessage("assistant", " b "), [ChatMessage("user", " c ")])
    assert renderer.decode_all(history.continuation(EOS)) == "c <reply>"
    history.add(ChatMessage("assistant", " d "), [ChatMessage("user", " e ")])
    assert renderer.decode_all(history.continuation(17)) == "</s> e <reply>"
    text = "<s> a <reply> b </s> c <reply> d </s> e <reply>"
    assert renderer.decode_all(history.prompt()) == text


def test_an_assistants_message_of_the_environment_is_no_reply(renderer) -> None:
    shown = [
        ChatMessage("user", " a "),
        ChatMessage("assistant", " b "),
        ChatMessage("user", " c "),
    ]
    history = History(renderer, shown, NO_INPUTS)
    history.add(ChatMessage("assistant", " d "), [ChatMessage("user", " e ")])
    assert (
        renderer.decode_all(history.prompt())
        == "<s> a <reply> b </s> c <reply> d </s> e <reply>"
    )


def test_earlier_results_stand_behind_their_calls_where_a_template_demands_it(
    tmp_path,
) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(DEMANDING)
    renderer = Renderer(tmp_path)
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    history = History(renderer, [ChatMessage("user", "a")], TemplateInputs(tools))
    call = ParsedToolCall("one", "add", "{}")
    history.add(
        ParsedReply("b", tool_calls=(call,)).message, [ChatMessage("tool", "c", "one")]
    )
    assert history.continuation(EOS) is None
    assert renderer.decode_all(history.prompt()) == "a b c"
    history.add(ChatMessage("assistant", "d"), [ChatMessage("user", "e")])
    assert renderer.decode_all(history.continuation(EOS)) == "e"


# Results stand with the names of their calls, and calls written badly are refused.
NAMED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.items() }}"
    "{% endfor %}{% set n = messages[loop.index0 - 1].tool_calls if m.role == 'tool' %}"
    "{{ n[0].function.name if n }} {{ m.content }} {% endfor %}"
)


def test_results_that_a_template_writes_by_their_calls_are_read_anew(tmp_path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(NAMED)
    renderer = Renderer(tmp_path)
    for arguments, text in (("{}", None), ("{", "c")):
        history = History(renderer, [ChatMessage("user", "a")], NO_INPUTS)
        call = ParsedToolCall("one", "d", arguments)
        history.add(
            ParsedReply("b", tool_calls=(call,)).message,
            [ChatMessage("tool", "c", "one")],
        )
        continuation = history.continuation(EOS)
        # After a call that the template cannot write, the result stands as behind a plain reply.
        assert (
            continuation if continuation is None else renderer.decode_all(continuation)
        ) == text


def test_a_result_may_answer_any_call_of_the_episode_and_no_other(renderer) -> None:
    history = History(renderer, [ChatMessage("user", "a")], NO_INPUTS)
    calls = (ParsedToolCall("one", "add", "{}"), ParsedToolCall("two", "add", "{}"))
    history.add(
        ParsedReply("b", tool_calls=calls).message, [ChatMessage("tool", "c", "two")]
    )
    history.add(ChatMessage("assistant", "b"), [ChatMessage("tool", "c", "one")])
    with pytest.raises(
        EnvironmentFailed, match="must be the id of a call of the model, got 'on'"
    ):
        history.add(ChatMessage("assistant", "b"), [ChatMessage("tool", "c", "on")])


def test_all_fields_of_an_environments_messages_reach_the_template() -> None:
    arguments = {"city": "Oslo", "days": None}
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }
    as_text = {**call, "function": {"name": "look", "arguments": json.dumps(arguments)}}
    shown = [
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [as_text],
            "thinking": "hm",
        },
        {"role": "tool", "content": "-3 C", "tool_call_id": "c1", "name": "look"},
    ]
    sent = observation(shown, Environment()).messages
    for_templates = [ChatMessage.from_pb(message).for_template() for message in sent]
    reply = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
        "reasoning_content": "hm",
    }
    assert for_templates == [shown[0], reply, shown[2]]
    # A Message says the same, and is what an API takes.
    messages = [read_message(message) for message in shown]
    assert list(observation(messages, Environment()).messages) == list(sent)
    assert messages[1].fields() == {**reply, "tool_calls": [as_text]}
    assert read_message(messages[2]) == messages[2]


def test_a_result_may_answer_a_call_that_the_environment_has_shown(renderer) -> None:
    call = ParsedToolCall("c1", "look", "{}")
    shown = [
        ChatMessage("user", " a "),
        ChatMessage("assistant", " b ", tool_calls=(call,)),
    ]
    history = History(renderer, shown, NO_INPUTS)
    history.add(ChatMessage("assistant", " c "), [ChatMessage("tool", " d ", "c1")])
    with pytest.raises(
        EnvironmentFailed, match="tool_call_id must be the id of a call"
    ):
        history.add(ChatMessage("assistant", " c "), [ChatMessage("tool", " d ", "c2")])


@pytest.mark.parametrize(
    "call", [ToolCall(0, "look", {}), {"id": 7, "function": {"name": "look"}}]
)
def test_the_id_of_a_call_is_a_text_where_it_is_read(call: object) -> None:
    with pytest.raises(ValueError, match="the id of a call must be a text, got [07]"):
        read_message({"role": "assistant", "content": "", "tool_calls": [call]})
