"""Games of textarena: by one player, against an opponent, or with the model on every side."""

import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.client.agent import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.core.errors import ConfigError
from slipstream.environments.arguments import check_at_least
from slipstream.environments.frameworks.packages import (
    Foreign,
    import_function,
    import_package,
    unknown_name,
)
from slipstream.environments.frameworks.splits import Seeds, Split
from slipstream.environments.frameworks.textarena_game import TextArenaGame, keep_off_the_network

# Seconds for one reply of the model, which may wait for weights.
REPLY_LIMIT_S = 3600.0
# Errors with which an endpoint of the run says that one of its limits is reached.
LIMITS = frozenset({"max_turns_exceeded", "max_branches_exceeded", "context_length_exceeded"})


@dataclass(frozen=True)
class Match:
    """One task: the seed of a game, and the player whom the model is against an opponent."""

    seed: int
    player: int


class TextArena(AgentEnvironment[Match]):
    """Plays one game of `textarena.make(id, **kwargs)`.

    Without `opponent` the model is every player, and each player is trained by its own reward; that
    of the episode is their mean. With it tasks take turns in which player the model is, whose
    reward is that of the episode. A game that a limit of the run ends is unfinished and has the
    reward `unfinished_reward`.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_players: int = 2,
        opponent: str | None = None,
        opponent_args: Mapping[str, Any] | None = None,
        split: str = "train",
        heldout_one_in: int = 10,
        num_tasks: int | None = None,
        seed: int = 0,
        unfinished_reward: float = 0.0,
    ) -> None:
        """`opponent` is "module:class" of an agent as textarena knows them.

        It is made once, with `opponent_args`, and plays the other players of all games. Raises
        ConfigError for arguments that cannot work.
        """
        check_at_least("num_players", num_players, 1)
        keep_off_the_network()
        library = import_package("textarena", install="textarena")
        if id not in library.envs.registration.ENV_REGISTRY:
            raise unknown_name("textarena has no game", id, library.envs.registration.ENV_REGISTRY)
        self._id, self._kwargs, self._num_players = id, dict(kwargs or {}), num_players
        self._opponent = _make_opponent(opponent, opponent_args or {})
        self._unfinished_reward = unfinished_reward
        self._seeds = Seeds(Split(split, heldout_one_in), seed, num_tasks)
        # One client for all episodes: to make one takes longer than a call.
        openai = import_package("openai", install="openai")
        self._client = openai.AsyncOpenAI(
            api_key="of no episode", base_url="http://127.0.0.1:9", timeout=REPLY_LIMIT_S
        )
        # What cannot be played is refused before anything starts.
        self._begin(Match(0, 0))

    def tasks(self) -> list[Match] | Iterator[Match]:
        """Returns matches: `num_tasks` of them, or an iterator without end."""
        seeds = self._seeds.draw()
        matches = (Match(s, i % self._num_players) for i, s in enumerate(seeds))
        return list(matches) if isinstance(seeds, list) else matches

    async def run(self, task: Match, endpoint: Endpoint) -> AgentOutcome:
        """Plays one game to its end, or to a limit of the run."""
        game = self._begin(task)
        trained = {task.player} if self._opponent is not None else set(range(self._num_players))
        seats = [self._seat(player, trained, endpoint) for player in range(self._num_players)]
        num_turns, is_unfinished = 0, False
        while not game.is_done:
            player, text = game.observe()
            try:
                move = await seats[player].move(text)
            except NoRoom:
                is_unfinished = True
                break
            num_turns += player in trained
            game.step(move)
        rewards, invalid = {player: self._unfinished_reward for player in trained}, set[int]()
        if not is_unfinished:
            rewards, invalid = game.result()
        metrics = {
            "turns": float(num_turns),
            "unfinished": float(is_unfinished),
            "won": float(rewards[min(trained)] > 0),
            "invalid": float(bool(invalid & trained)),
        }
        own = {_branch(player): rewards[player] for player in sorted(trained)}
        return AgentOutcome(
            statistics.fmean(own.values()), metrics, rewards=own if len(own) > 1 else {}
        )

    def _begin(self, task: Match) -> TextArenaGame:
        return TextArenaGame(self._id, self._kwargs, self._num_players, seed=task.seed)

    def _seat(self, player: int, trained: set[int], endpoint: Endpoint) -> "Seat":
        if self._opponent is not None and player not in trained:
            return AgentSeat(self._opponent, player)
        own = endpoint.branch(_branch(player))
        return ModelSeat(self._client.with_options(base_url=own.base_url, api_key=own.api_key))


class NoRoom(Exception):
    """A limit of the run leaves no room for another reply."""


class Seat(Protocol):
    """The place of one player in one game."""

    async def move(self, text: str) -> str:
        """Returns the player's next move; `text` is what the player has not read yet."""


class ModelSeat:
    """The model in training, which reads `text` as the next message of a conversation."""

    def __init__(self, client: Foreign) -> None:
        self._client = client
        self._messages: list[Any] = []

    async def move(self, text: str) -> str:
        """Asks the model; raises NoRoom, or another error of the API."""
        import openai

        self._messages.append({"role": "user", "content": text})
        try:
            answer = await self._client.chat.completions.create(
                model="policy", messages=self._messages
            )
        except openai.BadRequestError as error:
            if error.code in LIMITS:
                raise NoRoom from error
            raise
        self._messages.append(answer.choices[0].message)
        return answer.choices[0].message.content or ""


class AgentSeat:
    """An agent as textarena knows them, which reads the whole game at each turn; it may block."""

    def __init__(self, agent: Callable[[str], str], player: int) -> None:
        self._agent, self._player, self._heard = agent, player, ""

    async def move(self, text: str) -> str:
        """Asks the agent, in a thread."""
        self._heard = f"{self._heard}\n{text}".strip()
        move = str(await asyncio.to_thread(self._agent, self._heard))
        # What is new to a player leaves its own moves out.
        self._heard += f"\n[Player {self._player}] {move}"
        return move


def _make_opponent(name: str | None, args: Mapping[str, Any]) -> Callable[[str], str] | None:
    if name is None:
        if args:
            raise ConfigError(f"opponent_args are for an opponent, got {dict(args)} without one")
        return None
    try:
        made: Callable[[str], str] = import_function("opponent", name)(**args)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"opponent {name}: {error}") from error
    return made


def _branch(player: int) -> str:
    return f"player-{player}"
