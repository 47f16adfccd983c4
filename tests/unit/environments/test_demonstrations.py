"""Demonstrations from files, and what is wrong in them."""

import json
from pathlib import Path

import pytest
from slipstream.client.environment import Message, StepResult
from slipstream.core.errors import ConfigError
from slipstream.environments.demonstrations import Demonstrations


def file_of(folder: Path, *rows: object) -> str:
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def talk(*roles_and_texts: str) -> dict[str, object]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_every_reply_of_a_conversation_is_given_in_turn(tmp_path: Path) -> None:
    row = talk(
        "user", "q", "assistant", "r", "tool", "t", "user", "u", "assistant", "s", "user", "x"
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
    assert environment.step("s") == StepResult(reward=1.0)


def test_two_columns_are_a_prompt_and_its_reply(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1", "answer": 2}, {"question": "2 + 2", "answer": 4}]
    path = file_of(tmp_path, *rows)
    environment = Demonstrations(path, prompt="question", reply="answer", limit=1)
    (task,) = environment.tasks()
    opening = environment.reset(task)
    assert (opening.messages, opening.reply) == ((Message("user", "1 + 1"),), "2")


def test_a_seed_shuffles_the_rows_before_the_limit(tmp_path: Path) -> None:
    path = file_of(tmp_path, *(talk("user", str(n), "assistant", str(n)) for n in range(50)))
    drawn = Demonstrations(path, shuffle_seed=1, limit=10).tasks()
    assert drawn == Demonstrations(path, shuffle_seed=1, limit=10).tasks()
    assert drawn != Demonstrations(path, limit=10).tasks()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (talk("user", "q"), "row 2 has no message with role = 'assistant'"),
        (talk("assistant", "r"), "row 2: a reply must follow a message"),
        (talk("user", "q", "assistant", ""), "row 2: a reply is empty"),
        ({"text": "q"}, "row 2 has nothing in the column 'messages'; its columns are text"),
        ({"messages": "q"}, "row 2: column 'messages' must hold a list of messages"),
        ({"messages": ["q"]}, "row 2: column 'messages' must hold messages with role and content"),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [1]}]},
            "row 2: column 'messages' holds tool_calls: write them into content",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": None, "tool_calls": []},
                ]
            },
            "row 2: column 'messages': the content of a message must be a text, got None",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
            r"row 2: column 'messages': the content of a message must be a text, got \[{'type'",
        ),
        (
            {"messages": [{"role": None, "content": "q"}]},
            "row 2: column 'messages': the role of a message must be a text, got None",
        ),
    ],
)
def test_a_row_that_gives_no_reply_is_named(tmp_path: Path, row: object, said: str) -> None:
    path = file_of(tmp_path, talk("user", "q", "assistant", "r"), row)
    with pytest.raises(ConfigError, match=said):
        Demonstrations(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"q": [{"text": "a"}], "a": "b"}, r"row 1: column 'q' must hold a text, got \[{'text'"),
        ({"q": "a", "a": {"text": "b"}}, "row 1: column 'a' must hold a text, got {'text'"),
    ],
)
def test_two_columns_that_hold_no_texts_are_named(tmp_path: Path, row: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Demonstrations(file_of(tmp_path, row), prompt="q", reply="a")


def test_arguments_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = file_of(tmp_path, talk("user", "q", "assistant", "r"))
    with pytest.raises(ConfigError, match="prompt and reply name columns together, got 'p' and"):
        Demonstrations(path, prompt="p")
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        Demonstrations(path, limit=0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no rows"):
        Demonstrations(str(tmp_path / "empty.jsonl"))
