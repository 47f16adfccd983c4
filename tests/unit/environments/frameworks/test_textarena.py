import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from slipstream.client.environment_loader import load_environment
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.v1 import environment_pb2 as pb
from support.fakes.scripted_server import Episode, as_json, chat_reply

pytest.importorskip("textarena", reason="pip install textarena")

from slipstream.environments.frameworks.textarena import TextArena  # noqa: E402
from slipstream.environments.frameworks.textarena_game import TextArenaGame  # noqa: E402

REFERENCE = "slipstream.environments.frameworks.textarena:TextArena"
Script = Callable[[str, list[dict]], str | int]

AGENTS = """
import textarena

class First(textarena.Agent):
    heard = []

    def __init__(self, move="0"):
        self.move = move

    def __call__(self, observation):
        self.heard.append(observation)
        return self.move

class Broken(textarena.Agent):
    def __call__(self, observation):
        raise ConnectionError("no answer")

def refuses(**args):
    raise ValueError("an API key is missing")
"""


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_players.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_players", raising=False)
    return "my_players"


def says(script: Script) -> Callable[[pb.AgentCall], AsyncIterator[pb.ReplyPart]]:
    """Answers calls with what `script` returns for branch and messages; a number is an error."""

    async def answer(call: pb.AgentCall) -> AsyncIterator[pb.ReplyPart]:
        said = script(call.branch, json.loads(call.body)["messages"])
        if isinstance(said, int):
            code = "max_turns_exceeded" if said == 400 else "other"
            yield as_json({"error": {"message": "no", "code": code}}, status=said)
        else:
            yield as_json(chat_reply(said))

    return answer


async def played(
    environment: TextArena, script: Script, task: int = 0
) -> tuple[Episode, pb.WorkerMessage]:
    host = EpisodeHost(environment)
    episode = Episode(host, says(script), task_index=task)
    try:
        return episode, await episode.run()
    finally:
        await host.close_all()
        await environment._client.close()


def in_turn(*moves: str) -> Script:
    left = iter(moves)
    return lambda branch, messages: next(left)


def refusal(*args: object, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        TextArena(*args, **settings)
    return str(caught.value)


async def test_a_conversation_goes_on_with_what_is_new_to_its_player() -> None:
    seen: dict[str, list[list[dict]]] = {"player-0": [], "player-1": []}
    moves = in_turn("[0]", "[1]", "[3]", "[2]", "[6]")

    def script(branch: str, messages: list[dict]) -> str | int:
        seen[branch].append(messages)
        return moves(branch, messages)

    await played(TextArena("TicTacToe-v0"), script)
    for conversation in seen.values():
        for before, after in zip(conversation, conversation[1:], strict=False):
            assert after[: len(before)] == before
            assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    first, second, _ = seen["player-0"]
    assert "You are Player 0 in Tic Tac Toe." in first[0]["content"]
    news = second[-1]["content"]
    assert "[Player 1] [1]" in news
    assert "Tic Tac Toe" not in news
    assert "[Player 0] [0]" not in news, "a player's own words are in the conversation already"


@pytest.mark.parametrize(("task", "trained"), [(0, 0), (1, 1)])
async def test_with_an_opponent_tasks_take_turns_in_which_player_the_model_is(
    agents: str, task: int, trained: int
) -> None:
    # The other player's second move is not free, and after a warning neither is its third.
    environment = TextArena("TicTacToe-v0", num_tasks=2, opponent=f"{agents}:First")
    assert [match.player for match in environment.tasks()] == [0, 1]
    episode, answer = await played(environment, in_turn("[1]", "[2]", "[3]"), task=task)
    assert answer.agent_result.reward == 1.0
    assert not answer.agent_result.rewards
    assert {call.branch for call in episode.calls} == {f"player-{trained}"}
    assert answer.agent_result.metrics["turns"] == len(episode.calls)


async def test_a_second_invalid_move_loses_the_game() -> None:
    environment = TextArena("TicTacToe-v0")
    _, answer = await played(environment, lambda branch, messages: "pass")
    assert dict(answer.agent_result.rewards) == {"player-0": -1.0, "player-1": 1.0}
    assert answer.agent_result.metrics["invalid"] == 1.0


async def test_games_side_by_side_have_their_own_chance() -> None:
    def cards(disturbed: bool) -> list[str]:
        game = TextArenaGame("KuhnPoker-v0-long", {}, 2, seed=5)
        texts = []
        for move in ("[check]", "[check]") * 4:
            texts.append(game.observe()[1])
            if disturbed:
                random.seed(len(texts))
            game.step(move)
        return texts

    state = random.getstate()
    undisturbed = cards(disturbed=False)
    assert random.getstate() == state
    assert cards(disturbed=True) == undisturbed


async def test_an_agent_of_textarena_reads_the_whole_game_once(agents: str) -> None:
    environment = TextArena(
        "TicTacToe-v0", opponent=f"{agents}:First", opponent_args={"move": "[8]"}
    )
    await played(environment, in_turn("[0]", "[1]", "[2]"))
    last = sys.modules[agents].First.heard[-1]
    assert last.count("in Tic Tac Toe.") == 1
    assert last.count("[Player 0] [0]") == last.count("[Player 0] [1]") == 1
    assert last.count("[Player 1] [8]") == 2


async def test_an_agent_that_fails_makes_a_failed_episode(agents: str) -> None:
    environment = TextArena("TicTacToe-v0", opponent=f"{agents}:Broken")
    _, answer = await played(environment, in_turn("[0]", "[1]", "[2]"))
    assert "ConnectionError: no answer" in answer.failure.message


async def test_a_game_that_a_limit_ends_is_unfinished() -> None:
    environment = TextArena("TicTacToe-v0", unfinished_reward=-0.5)
    moves = iter(["[0]", "[1]"])
    _, answer = await played(environment, lambda branch, messages: next(moves, 400))
    result = answer.agent_result
    assert result.reward == -0.5
    assert dict(result.rewards) == {"player-0": -0.5, "player-1": -0.5}
    assert result.metrics == {"turns": 2.0, "unfinished": 1.0, "won": 0.0, "invalid": 0.0}


async def test_another_error_of_the_endpoint_is_a_failure() -> None:
    _, answer = await played(TextArena("TicTacToe-v0"), lambda branch, messages: 422)
    assert "UnprocessableEntityError" in answer.failure.message


async def test_in_play_against_itself_each_player_has_its_own_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TextArenaGame, "result", lambda game: ({0: 1.0, 1: 0.5}, {1}))
    environment = TextArena("TicTacToe-v0")
    _, answer = await played(environment, in_turn("[0]", "[1]", "[3]", "[2]", "[6]"), task=1)
    result = answer.agent_result
    assert result.reward == 0.75
    assert dict(result.rewards) == {"player-0": 1.0, "player-1": 0.5}
    assert not result.shares
    assert result.metrics == {"turns": 5.0, "unfinished": 0.0, "won": 1.0, "invalid": 1.0}


async def test_a_game_of_one_player() -> None:
    environment = TextArena("GuessTheNumber-v0", num_players=1)
    game = TextArenaGame("GuessTheNumber-v0", {}, 1, seed=0)
    number = game._game.state.game_state["game_number"]
    _, answer = await played(environment, lambda branch, messages: f"[{number}]")
    assert answer.agent_result.reward == 1.0


def test_data_that_are_missing_are_named_at_once_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import nltk

    def connect(*_: object, **__: object) -> None:
        pytest.fail("a game called the network")

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    monkeypatch.setattr(nltk.data, "path", [])
    assert refusal("Wordle-v0", num_players=1) == (
        "game 'Wordle-v0': the game needs data of nltk: "
        "python -m nltk.downloader averaged_perceptron_tagger_eng"
    )
    assert "python -m nltk.downloader words" in refusal("Hangman-v0", num_players=1)


def test_data_on_the_disk_are_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    (folder / "en").write_text("apple\ntables\nwinter\n")
    (folder / "en-basic").write_text("apple\ntables\nwinter\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(
        nltk.corpus,
        "words",
        nltk.corpus.util.LazyCorpusLoader(
            "words", nltk.corpus.reader.WordListCorpusReader, r"(?!README|\.).*"
        ),
    )
    for name in [name for name in sys.modules if name.startswith("textarena.envs.Hangman")]:
        monkeypatch.delitem(sys.modules, name)
    environment = TextArena("Hangman-v0", num_players=1)
    _, text = environment._begin(environment.tasks().__next__()).observe()
    assert "Hangman" in text


def test_what_cannot_work_is_named(agents: str) -> None:
    assert refusal("TicTacTo-v0").startswith("textarena has no game 'TicTacTo-v0'; did you mean")
    assert "received 2" in refusal("GuessTheNumber-v0")
    assert "unexpected keyword argument" in refusal("TicTacToe-v0", {"size": 4})
    assert "API key" in refusal("TwentyQuestions-v0", num_players=1)
    assert "must be module:function" in refusal("TicTacToe-v0", opponent="strong")
    assert refusal("TicTacToe-v0", opponent=f"{agents}:refuses") == (
        "opponent my_players:refuses: an API key is missing"
    )
    assert "opponent_args are for" in refusal("TicTacToe-v0", opponent_args={"model": "x"})
    if sys.version_info < (3, 12):
        assert "is written in a newer Python" in refusal("Chess-v0")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(EnvironmentFailed) as caught:
        load_environment(REFERENCE, json.dumps({"id": "TicTacToe-v0"}), "")
    assert str(caught.value) == "the package 'textarena' is missing: pip install textarena"
