"""Rows of episodes with turns, branches, thoughts and replies that were cut."""

import pytest
from slipstream.core.configuration.reply_ends import ReplyEnds
from slipstream.core.types import Branch, PolicyVersion, Status, Trajectory, VersionSpan
from slipstream.extensions.rollouts.messages import with_reply
from slipstream.extensions.rollouts.rows import RowMaker
from slipstream.rollout_server.chat import ChatMessage
from slipstream.rollout_server.episodes.renderer import Renderer
from support.fakes.chat_models import END, make_chat_tokenizer
from support.fakes.plain_trajectory import plain_trajectory
from support.fakes.small_configs import config_with

ASKED = ChatMessage("user", "one?")
RESULT = ChatMessage("tool", "2")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("model")
    make_chat_tokenizer(folder)
    end = next(token for token, text in Renderer(folder).added.items() if text == END)
    return Renderer(folder, ends=ReplyEnds(model=(end,)))


@pytest.fixture(scope="module")
def maker(renderer: Renderer) -> RowMaker:
    return RowMaker(config_with(), renderer)


def read(message: ChatMessage) -> dict[str, object]:
    """A message of a row that the model has read."""
    return {
        "role": message.role,
        "content": message.content,
        "weight": None,
    }


def reply(content: str, *, weight: int = 1) -> dict[str, object]:
    """A reply of a row."""
    return {
        "role": "assistant",
        "content": content,
        "weight": weight,
    }


def one_turn(
    prompt: list[int], reply_tokens: list[int], **fields: object
) -> Trajectory:
    lengths = [len(prompt), len(reply_tokens)]
    return plain_trajectory(
        prompt + reply_tokens,
        lengths,
        **fields,
    )


def two_turns(renderer: Renderer, **fields: object) -> Trajectory:
    questions = [ASKED]
    results = [RESULT]
    prompt = renderer.prompt(questions)
    first = renderer.reply(
        "<think>hm</think>call",
        questions,
        following=results,
    )
    history = with_reply(questions)
    between = renderer.continuation(history, results, first[-1])
    second = renderer.reply("Two.", history + results)
    runs = [prompt, first, between, second]
    lengths = [len(run) for run in runs]
    return plain_trajectory(
        sum(runs, []),
        lengths,
        **fields,
    )


def test_a_row_has_the_whole_conversation_and_each_reply(
    renderer: Renderer, maker: RowMaker
) -> None:
    trajectory = two_turns(
        renderer,
        reward=1.0,
        metrics={"b": 2.0, "a": 1.0},
    )
    (row,) = maker.rows(3, trajectory)
    assert row["messages"] == [
        read(ASKED),
        reply("<think>hm</think>call"),
        read(RESULT),
        reply("Two."),
    ]
    first, second = row["replies"]
    assert first["thoughts"] == "hm"
    assert first["content"] == "call"
    assert first["reward"] == 0.0
    assert second["thoughts"] == ""
    assert second["content"] == "Two."
    assert second["text"] == f"Two.{END}"
    assert second["reward"] == 1.0
    names = [metric["name"] for metric in row["metrics"]]
    assert names == ["a", "b"]
    assert row["unreadable"] == ""
    # Step 3 trains version 2, and all tokens are of version 0.
    assert row["lag"] == 2.0


def test_a_reply_that_was_cut_is_not_trained(
    renderer: Renderer, maker: RowMaker
) -> None:
    prompt = renderer.prompt([ASKED])
    reply_tokens = renderer.reply("Two", [ASKED])
    trajectory = one_turn(
        prompt,
        reply_tokens[:-1],
        status=Status.TRUNCATED,
    )
    (row,) = maker.rows(1, trajectory)
    assert row["messages"][-1] == reply("Two", weight=0)
    assert row["status"] == "truncated"


def test_a_reply_of_nothing_but_its_end_is_not_trained(
    renderer: Renderer, maker: RowMaker
) -> None:
    prompt = renderer.prompt([ASKED])
    reply_tokens = renderer.reply("Two", [ASKED])
    trajectory = one_turn(prompt, reply_tokens[-1:])
    (row,) = maker.rows(1, trajectory)
    assert row["messages"][-1] == reply("", weight=0)


def test_each_branch_is_a_row_with_its_own_reward_and_versions(
    renderer: Renderer, maker: RowMaker
) -> None:
    prompt = renderer.prompt([ASKED])
    first = renderer.reply("One.", [ASKED])
    second = renderer.reply("Three.", [ASKED])
    num_first = len(first)
    num_second = len(second)
    runs = [prompt, first, prompt, second]
    trajectory = plain_trajectory(
        sum(runs, []),
        [len(run) for run in runs],
        branches=(
            Branch(2, name="a", reward=0.25),
            Branch(2, name="b"),
        ),
        reward=1.0,
        version_spans=(
            VersionSpan(num_first + 1, PolicyVersion(0, 4)),
            VersionSpan(num_second - 1, PolicyVersion(0, 5)),
        ),
    )
    first_row, second_row = maker.rows(6, trajectory)
    assert first_row["branch_name"] == "a"
    assert first_row["reward"] == 0.25
    assert first_row["messages"][-1] == reply("One.")
    assert first_row["versions"] == [{"tokens": num_first, "version": "4"}]
    assert first_row["lag"] == 1.0
    assert second_row["branch"] == 1
    assert second_row["branch_name"] == "b"
    assert second_row["reward"] == 1.0
    assert second_row["messages"][-1] == reply("Three.")
    assert second_row["versions"] == [
        {"tokens": 1, "version": "4"},
        {"tokens": num_second - 1, "version": "5"},
    ]
    assert second_row["lag"] == 1 / num_second


def test_a_prompt_of_no_messages_leaves_a_row_that_says_so(
    renderer: Renderer, maker: RowMaker
) -> None:
    prompt = renderer.prompt([ASKED])
    reply_tokens = renderer.reply("Two.", [ASKED])
    trajectory = one_turn(prompt[1:], reply_tokens)
    (row,) = maker.rows(1, trajectory)
    assert row["messages"] is None
    assert row["unreadable"] == "the chat template writes its prompt for no messages"
    assert row["replies"][0]["content"] == "Two."


def test_images_have_no_messages(renderer: Renderer, maker: RowMaker) -> None:
    trajectory = two_turns(renderer, images=(b"image",))
    (row,) = maker.rows(1, trajectory)
    assert row["messages"] is None
    assert row["unreadable"] == "it shows images, which have no text"
