"""The game of gymnasium on the page of frameworks can be loaded, begins and is played."""

import copy
import json
import re
import tomllib
from pathlib import Path

import pytest
from slipstream.client.conversion import verdict
from slipstream.client.environment import Environment, TaskSource
from slipstream.client.environment_loader import load_environment
from slipstream.core.errors import EnvironmentFailed

GUIDES = Path(__file__).parents[4] / "docs" / "guides"
PAGE = GUIDES / "frameworks.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GAME = "deploy.environments.gymnasium_game:Game"


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(PAGE.read_text()) if kind == language]


def entries() -> list[dict]:
    tables = [tomllib.loads(text) for text in blocks("toml")]
    shown = [
        e
        for table in tables
        for part in table.values()
        if isinstance(part, list)
        for e in part
    ]
    return [entry for entry in shown if entry["reference"] == GAME]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["name"])
def test_every_environment_that_is_shown_begins(entry: dict) -> None:
    pytest.importorskip("gymnasium")
    environment = load_environment(GAME, json.dumps(entry["args"]), "")
    task = TaskSource(environment)[0]
    episode: Environment = copy.copy(environment)
    assert all(message.content for message in episode.reset(task))
    episode.close()


def test_a_game_of_gymnasium_is_played_by_named_actions() -> None:
    pytest.importorskip("gymnasium")
    (args,) = [entry["args"] for entry in entries() if entry["name"] == "frozen-lake"]
    game = load_environment(GAME, json.dumps(args), "")
    (message,) = game.reset(0)
    assert message.content.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    illegal = game.step("up to you, leftward")
    assert (illegal.reward, illegal.done) == (0.0, False)
    assert (
        game.step("jump").messages[0].content
        == "Reply with one of: left, down, right, up."
    )

    def judged(word: str) -> tuple[float, bool, int]:
        """What a worker tells of a step, which it refuses where nobody would read a message."""
        answer = verdict(game.step(word), gives=False)
        return answer.reward, answer.done, len(answer.messages)

    played = [
        judged(word) for word in ("down", "down", "right", "right", "down", "right")
    ]
    assert played == [(0.0, False, 1)] * 5 + [(1.0, True, 0)]
    game.reset(0)
    assert [judged("no") for _ in range(3)] == [(-1.0, False, 1)] * 2 + [
        (-1.0, True, 0)
    ]
    game.close()


def test_each_action_of_a_game_has_a_name() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(
        EnvironmentFailed, match="FrozenLake-v1 has 4 actions, and 1 have a name"
    ):
        load_environment(
            GAME, json.dumps({"id": "FrozenLake-v1", "actions": ["up"]}), ""
        )
