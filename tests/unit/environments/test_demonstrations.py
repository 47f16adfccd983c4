"""Demonstrations from files, and what is wrong in them."""

import json
from pathlib import Path

import pytest
from slipstream.client.environment import Message, StepResult, ToolCall
from slipstream.core.errors import ConfigError
from slipstream.environments.demonstrations import Demonstrations


def file_of(folder: Path, *rows: object) -> str:
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def message(role: str, content: object, **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def talk(*roles_and_texts: object) -> dict[str, object]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return {"messages": [message(role, text) for role, text in pairs]}


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": null}'},
}


def test_every_reply_of_a_conversation_is_given_in_turn(tmp_path: Path) -> None:
    row = talk(
        "user",
        "q",
        "assistant",
        "r",
        "tool",
        "t",
        "user",
        "u",
        "assistant",
        "s",
        "user",
        "x",
    )
    environment = Demonstrations(file_of(tmp_path, row), system="Be short.")
    (task,) = environment.tasks()
    opening = environment.reset(task)
    assert opening.messages == (Message("system", "Be short."), Message("user", "q"))
    assert opening.reply == "r"
    following = environment.step("r")
    assert following == StepResult(
        done=False, messages=(Message("tool", "t"), Message("user", "u")), reply="s"
    )
    # The messages that follow say how a template ends the last reply.
    assert environment.step("s") == StepResult(
        reward=1.0, messages=(Message("user", "x"),)
    )


def test_two_columns_are_a_prompt_and_its_reply(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1", "answer": 2}, {"question": "2 + 2", "answer": 4}]
    path = file_of(tmp_path, *rows)
    environment = Demonstrations(path, prompt="question", reply="answer", limit=1)
    (task,) = environment.tasks()
    opening = environment.reset(task)
    assert (opening.messages, opening.reply) == ((Message("user", "1 + 1"),), "2")


def test_a_seed_shuffles_the_rows_before_the_limit(tmp_path: Path) -> None:
    path = file_of(
        tmp_path, *(talk("user", str(n), "assistant", str(n)) for n in range(50))
    )
    drawn = Demonstrations(path, shuffle_seed=1, limit=10).tasks()
    assert drawn == Demonstrations(path, shuffle_seed=1, limit=10).tasks()
    assert drawn != Demonstrations(path, limit=10).tasks()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (talk("user", "q"), "row 2 has no message with role = 'assistant'"),
        (talk("assistant", "r"), "row 2: a reply must follow a message"),
        (talk("user", "q", "assistant", ""), "row 2: a reply is empty"),
        (talk("user", "q", "assistant", " \n"), "row 2: a reply is empty"),
        (
            talk("user", "q", "assistant", [{"type": "text", "text": "r"}] * 2),
            "row 2: a reply is a text, got 2 parts",
        ),
        ({"text": "q"}, "row 2 has no column 'messages'; its columns are 'text'"),
        ({"messages": "q"}, "row 2: column 'messages' must hold a list of messages"),
        (
            {"messages": ["q"]},
            "row 2: column 'messages': a message has role and content, got 'q'",
        ),
        (
            {"messages": [message("assistant", "", tool_calls=[CALL])]},
            "row 2: column 'messages' holds tool_calls: write them into content",
        ),
        (
            {
                "messages": [
                    message("user", "q"),
                    message("assistant", None, tool_calls=[]),
                ]
            },
            "row 2: column 'messages': content must be a text or a list of parts, got None",
        ),
        (
            talk("user", [{"type": "text", "text": "q"}]),
            "row 2 has no message with role = 'assistant'",
        ),
        (
            talk(None, "q"),
            "row 2: column 'messages': the role of a message must be a text, got No",
        ),
    ],
)
def test_a_row_that_gives_no_reply_is_named(
    tmp_path: Path, row: object, said: str
) -> None:
    path = file_of(tmp_path, talk("user", "q", "assistant", "r"), row)
    with pytest.raises(ConfigError, match=said):
        Demonstrations(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"q": [{"text": "a"}], "a": "b"},
            "row 1: column 'q': a message has role and content, got {",
        ),
        (
            {"q": "a", "a": {"text": "b"}},
            "row 1: column 'a' must hold a text or a number, got {",
        ),
        (
            {"q": "a", "a": True},
            "row 1: column 'a' must hold a text or a number, got True",
        ),
        (
            {"q": talk("user", "q", "assistant", "r")["messages"], "a": "b"},
            "row 1: a reply must follow a message, got two replies",
        ),
    ],
)
def test_two_columns_that_hold_no_texts_are_named(
    tmp_path: Path, row: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Demonstrations(file_of(tmp_path, row), prompt="q", reply="a")


def test_arguments_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = file_of(tmp_path, talk("user", "q", "assistant", "r"))
    with pytest.raises(
        ConfigError, match="prompt and reply name columns together, got 'p' and"
    ):
        Demonstrations(path, prompt="p")
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        Demonstrations(path, limit=0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no rows"):
        Demonstrations(str(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("name", ["weight", "train", "training", "trainable"])
def test_a_reply_that_is_not_to_be_trained_is_context(
    tmp_path: Path, name: str
) -> None:
    row = {
        "messages": [
            message("user", "a"),
            message("assistant", "WRONG", **{name: 0}),
            message("user", "no, again", **{name: 0}),
            message("assistant", "right", **{name: 1}),
            message("user", "b", **{name: None}),
            message("assistant", "WRONG too", **{name: False}),
            message("user", "c"),
            message("assistant", "right too"),
        ]
    }
    environment = Demonstrations(file_of(tmp_path, row))
    first, second = environment.tasks()[0].turns
    assert [message.text for message in first.messages] == ["a", "WRONG", "no, again"]
    assert [message.text for message in second.messages] == ["b", "WRONG too", "c"]
    assert (first.reply, second.reply) == ("right", "right too")


def test_calls_of_an_untrained_reply_and_the_offered_tools_are_given_on(
    tmp_path: Path,
) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "default": None}},
    }
    row = {
        "messages": [
            message("user", "q"),
            message(
                "assistant", None, tool_calls=[CALL], reasoning_content="hm", weight=0
            ),
            message("tool", "3", tool_call_id="c1", name="f"),
            message("assistant", "It is 3."),
        ],
        "tools": json.dumps([tool]),
        "source": "somewhere",
    }
    environment = Demonstrations(file_of(tmp_path, row))
    opening = environment.reset(environment.tasks()[0])
    call = ToolCall("c1", "f", '{"a": null}')
    assert opening.messages[1:] == (
        Message("assistant", "", tool_calls=(call,), reasoning="hm"),
        Message("tool", "3", "c1", "f"),
    )
    assert (list(opening.tools), opening.reply) == ([tool], "It is 3.")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([message("assistant", "r", weight=0.5)], "weight must be 0 or 1, got 0.5"),
        ([message("user", "q", train=True)], "only replies are trained, got a message of user"),
        ([message("user", "q", picture="x")], "a message has no field 'picture'; it has role"),
        (
            [message("assistant", "r", reasoning="a", thinking="b")],
            "a message has reasoning by two names with different values",
        ),
        (
            [message("assistant", "", tool_calls=[{"name": "f", "input": {"x": 1}}])],
            "a call of a tool has no field 'input'; it has id, type, function, name",
        ),
        (
            [message("assistant", "", tool_calls=[{"name": "f", "type": "custom"}])],
            "the type of a call must be 'function', got 'custom'",
        ),
        ([message("user", "q", tool_call=[1])], "a message has no field 'tool_call'; did you mean"),
        ([message("user", "q", tool_calls=[CALL])], "tool_calls stands in a message of role assi"),
        ([message("assistant", "r", thinking="hm")], "holds reasoning: write them into content"),
        ([message("assistant", "r", tool_calls=["f"], weight=0)], "a call of a tool has a func"),
        (
            [message("assistant", "", weight=0, tool_calls=[
                {"function": {"name": "f", "arguments": {"a": None}}}])],
            "arguments of f hold null, as parquet fills them: write JSON text",
        ),
        ([message("user", [{"type": "video", "video": "x"}])], "a part must be "),
        ([message("user", "\frac{1}{2}")], "holds '\\x0crac': in JSON a backslash of LaTeX is"),
        ([message("Assistant", "r")], "the role of a message must be 'assistant', got 'Assistant'"),
        ([message("gpt", "r")], "the role of a message must be 'assistant', got 'gpt'"),
        ([message("human", "q")], "the role of a message must be 'user', got 'human'"),
        ([{"from": "human", "value": "q"}], "a message has role and content, got {'from'"),
        (
            [message("tool", "5", tool_call_id="c2"), message("assistant", "r")],
            "no call has the id 'c2' of a result",
        ),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_used_is_named_with_file_and_row(
    tmp_path, row, said
) -> None:
    path = file_of(tmp_path, {"messages": row})
    with pytest.raises(ConfigError) as refused:
        Demonstrations(path)
    assert f"{path}, row 1: column 'messages'" in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_lines_of_code_are_no_lost_commands_of_latex(tmp_path: Path) -> None:
    code = "x = symbols('x')\neq = Eq(x, 2)\neq.subs(x, 1)\neq1 = Eq(x, 3)"
    row = [message("user", "Solve x = 2."), message("assistant", code)]
    demonstrations = Demonstrations(file_of(tmp_path, {"messages": row}))
    assert len(demonstrations.tasks()) == 1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"images": ["a.png"]}, "row 1: column 'images' is not read, got ['a.png']"),
        (
            {"chat_template_kwargs": {"a": 1}},
            "column 'chat_template_kwargs' is not read",
        ),
        ({"weight": 0}, "column 'weight' is not read, got 0"),
        ({"system": "Be kind."}, "column 'system' is not read, got Be kind."),
        ({"image": "a.png"}, "column 'image' is not read, got a.png"),
        ({"loss_mask": [0, 1]}, "column 'loss_mask' is not read, got [0, 1]"),
        ({"tools": [{"name": "f"}]}, 'tools[0] must be an object with type "function"'),
        (
            {"tools": "[{"},
            "column 'tools' looks like a list, but cannot be read",
        ),
    ],
)
def test_columns_that_would_change_a_reply_are_read_or_refused(
    tmp_path, extra, said
) -> None:
    row = talk("user", "q", "assistant", "r")
    assert Demonstrations(file_of(tmp_path, row | dict.fromkeys(extra))).tasks()
    with pytest.raises(ConfigError) as refused:
        Demonstrations(file_of(tmp_path, row | extra))
    assert said in str(refused.value)
    assert str(refused.value).count("row 1") == 1


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    row = talk("system", "In French.", "user", "q", "assistant", "r")
    for system in ("Be kind.", ""):
        with pytest.raises(
            ConfigError, match="begins with a system message: leave out system"
        ):
            Demonstrations(file_of(tmp_path, row), system=system)


def recorded(reply: str, *, weight: int = 1, unreadable: str = "") -> dict[str, object]:
    """A row of exported rollouts."""
    messages = [message("user", "q"), message("assistant", reply, weight=weight)]
    return {"messages": None if unreadable else messages, "unreadable": unreadable}


def test_exported_rollouts_are_demonstrations_of_the_replies_that_are_to_be_trained(
    tmp_path,
):
    control = "\x07 \text"
    rows = [
        recorded("cut", weight=0),
        recorded(control),
        recorded("", unreadable="images"),
    ]
    (task,) = Demonstrations(file_of(tmp_path, *rows)).tasks()
    assert task.turns[0].reply == control


def test_exported_rollouts_without_a_reply_to_train_are_refused_with_the_first_cause(
    tmp_path,
):
    path = file_of(
        tmp_path, recorded("cut", weight=0), recorded("", unreadable="it shows images")
    )
    with pytest.raises(
        ConfigError, match="no reply to train: .*row 1: each reply has weight 0"
    ):
        Demonstrations(path)
