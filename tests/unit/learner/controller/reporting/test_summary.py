"""Episodes in a form for people."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from slipstream.core.settings.config import Config
from slipstream.core.types import Branch, GroupId, Purpose
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.reporting.metrics import (
    group_line,
    open_token_texts,
    readable,
    sampled_groups,
)
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.small_configs import config_of
from support.references.documented_metrics import tables
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<s>", "</s>", "a", "b", "c", "d"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def episode(words: str, *run_lengths: int):
    token_ids = np.asarray([WORDS.index(word) for word in words.split()], np.uint32)
    plain = make_trajectory(1, 1)
    return dataclasses.replace(
        plain,
        token_ids=token_ids,
        run_lengths=run_lengths,
        reply_text="all that follows",
    )


def with_turns(folder: Path, max_turns: int) -> Config:
    config = config_of(folder)
    table = config.model_dump() | {"model": {"path": folder}}
    table["sampling"]["max_turns"] = max_turns
    return Config.model_validate(table)


def texts_of(model: Path):
    return asyncio.run(open_token_texts(with_turns(model, 2), EventLog()))


def test_each_turn_has_what_the_model_read_and_what_it_sampled(model: Path) -> None:
    texts = texts_of(model)
    trajectory = episode("<s> a b c </s> d a b </s>", 2, 3, 1, 3)
    first = {
        "context": "<s> a",
        "context_tokens": 2,
        "sampled": "b c </s>",
        "sampled_tokens": 3,
    }
    second = {
        "context": "d",
        "context_tokens": 1,
        "sampled": "a b </s>",
        "sampled_tokens": 3,
    }
    line = readable(7, trajectory, texts)
    assert line["turns"] == [first | {"reward": 0.0}, second | {"reward": 1.0}]
    earned = np.array([0, 0, 0.25, 0.5, 0, 0.25], np.float32)
    told = readable(7, dataclasses.replace(trajectory, token_rewards=earned), texts)
    assert told["turns"] == [first | {"reward": 0.25}, second | {"reward": 0.75}]
    assert (line["step"], line["sampled_tokens"], line["reply"]) == (
        7,
        6,
        "all that follows",
    )


def test_a_line_says_the_advantage_and_how_old_the_tokens_were() -> None:
    # Three tokens of version 100 and three of 101, trained from version 103 into 104.
    line = readable(104, make_trajectory(2, 6, num_versions=2), None, 0.25)
    assert (line["advantage"], line["lag"]) == (0.25, 2.5)
    trajectory = dataclasses.replace(make_trajectory(2, 6), version_spans=())
    assert readable(104, trajectory, None)["lag"] is None


def test_a_group_has_the_numbers_of_each_member() -> None:
    member = dataclasses.replace(
        make_trajectory(2, 2), behavior_logprobs=np.asarray([-1, -2], np.float32)
    )
    trajectory = dataclasses.replace(member, version_spans=(), reward=0.0)
    assert group_line(7, [member, trajectory]) == {
        "step": 7,
        "environment": "echo",
        "task_index": 12345,
        "rewards": [1.0, 0.0],
        "sampled_tokens": [2, 2],
        "surprisal": [1.5, None],
    }


def test_a_turn_without_a_reply_is_one_all_the_same(model: Path) -> None:
    texts = texts_of(model)
    turns = readable(0, episode("a b c", 1, 1, 1), texts)["turns"]
    assert turns[1] == {
        "context": "c",
        "context_tokens": 1,
        "sampled": "",
        "sampled_tokens": 0,
        "reward": None,
    }


def test_an_episode_of_one_turn_has_prompt_and_reply_only(model: Path) -> None:
    assert "turns" not in readable(0, episode("a b", 1, 1), texts_of(model))
    assert "turns" not in readable(0, episode("a b c d", 1, 1, 1, 1), None)


def test_branches_have_their_own_turns_and_rewards(model: Path) -> None:
    texts = texts_of(model)
    words = "<s> a b </s> c d </s> <s> a b </s> d a </s>"
    branches = (Branch(4), Branch(2, 0.5, "reviewer", 2.0))
    tree = dataclasses.replace(episode(words, 2, 2, 1, 2, 5, 2), branches=branches)
    line = readable(0, tree, texts)
    assert "turns" not in line
    first, reviewer = line["branches"]
    assert [turn["sampled"] for turn in first["turns"]] == ["b </s>", "d </s>"]
    assert (first["name"], first["share"], first["sampled_tokens"]) == ("", 1.0, 4)
    assert (reviewer["name"], reviewer["share"], reviewer["reward"]) == (
        "reviewer",
        0.5,
        2.0,
    )
    assert first["reward"] is None
    assert reviewer["turns"] == [
        {
            "context": "<s> a b </s> d",
            "context_tokens": 5,
            "sampled": "a </s>",
            "sampled_tokens": 2,
            # Branches that share a reward do not say which turn earned it.
            "reward": None,
        }
    ]
    for branch in readable(0, tree, None)["branches"]:
        assert "turns" not in branch


def test_all_that_a_line_says_is_documented(model: Path) -> None:
    line = readable(0, episode("a b c d", 1, 1, 1, 1), texts_of(model))
    fields, turn, branch, *_ = tables("trajectories.jsonl", "guides/watching.md")
    assert set(line) <= set(fields)
    tree = dataclasses.replace(
        episode("a b c d", 1, 1, 1, 1), branches=(Branch(2), Branch(2))
    )
    told = readable(0, tree, texts_of(model))
    assert set(told) <= set(fields)
    assert set(told["branches"][0]) == set(branch)
    assert json.loads(json.dumps(told)) == told
    assert set(line["turns"][0]) <= set(turn)
    assert json.loads(json.dumps(line)) == line


async def test_the_tokenizer_is_read_for_several_turns_only(model: Path) -> None:
    events = EventLog()
    assert await open_token_texts(with_turns(model, 1), events) is None
    for max_turns in (0, 2):
        texts = await open_token_texts(with_turns(model, max_turns), events)
    assert texts(np.asarray([2, 1], np.uint32)) == "a </s>"
    assert not list(events.kept())


async def test_a_model_without_tokenizer_json_is_one_warning(tmp_path: Path) -> None:
    events = EventLog()
    for max_turns in (0, 2):
        assert await open_token_texts(with_turns(tmp_path, max_turns), events) is None
    (event,) = events.kept()
    assert event.text == (
        f"trajectories.jsonl does not tell turns apart: {tmp_path} has no tokenizer.json"
    )


def group_of(environment: str) -> Group:
    return Group(GroupId("g"), environment, 0, 0, Purpose.TRAINING, 4, 0, None)


def kept(*environments: str) -> list[int]:
    groups = [group_of(name) for name in environments]
    return [groups.index(group) for group in sampled_groups(groups)]


def test_the_first_group_of_each_environment_is_kept_and_two_where_there_is_one() -> (
    None
):
    assert kept("a", "a", "b", "a", "c", "b") == [0, 2, 4]
    assert kept("a", "a", "a") == [0, 1]
    assert kept("a") == [0]
