"""Games of textarena: by one player, against an opponent, or with the model on every side."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.client.agent import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.packages import (
    check_at_least,
    check_choice,
    import_package,
    unknown_name,
)
from slipstream.environments.frameworks.seats import (
    LIMITS,
    SELF,
    ModelSeat,
    NoRoom,
    Player,
    make_opponent,
)
from slipstream.environments.frameworks.splits import Seeds, Split
from slipstream.environments.frameworks.textarena_game import TextArenaGame, keep_off_the_network

# Seconds for one reply of the model, which may wait for weights.
REPLY_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Match:
    """One task: the seed of a game, and the player whose reward counts."""

    seed: int
    player: int


class TextArena(AgentEnvironment[Match]):
    """Plays one game of `textarena.make(id, **kwargs)`; the reward is a player's reward.

    `opponent` plays the others: "self" is the model in training, "random" takes any legal move.
    With `train = "one"` tasks take turns in which player is trained. With `train = "both"` two
    players of a zero-sum game are: the reward is player 0's, and player 1's conversation has the
    share -1, which is its own advantage exactly. With `train = "all"` all players are, each by its
    own reward; that of the episode is their mean. A game that a limit of the run ends is unfinished
    and has the reward `unfinished_reward`.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_players: int = 2,
        train: Literal["one", "both", "all"] = "one",
        opponent: str = SELF,
        opponent_args: Mapping[str, Any] | None = None,
        prompts: Literal["new", "whole"] = "new",
        split: Literal["train", "heldout"] = "train",
        heldout_one_in: int = 10,
        num_tasks: int | None = None,
        seed: int = 0,
        unfinished_reward: float = 0.0,
    ) -> None:
        """`opponent` may also be the URL of an OpenAI API, or "module:class" of an agent.

        `prompts`: with "new" a player's conversation goes on, and each message is what the player
        has not seen; with "whole" each turn is a conversation of its own, with what the wrappers
        of `id` show. Raises ConfigError for arguments that cannot work.
        """
        check_choice("train", train, ("one", "both", "all"))
        check_choice("prompts", prompts, ("new", "whole"))
        check_at_least("num_players", num_players, 1)
        if train == "both" and (num_players != 2 or opponent != SELF or unfinished_reward):
            raise ConfigError(
                "train = 'both' is for num_players = 2, opponent = 'self' and "
                f"unfinished_reward = 0, got {num_players}, {opponent!r} and {unfinished_reward:g}"
            )
        if train == "all" and opponent != SELF:
            raise ConfigError(f"train = 'all' is for opponent = 'self', got {opponent!r}")
        keep_off_the_network()
        library = import_package("textarena", install="textarena")
        if id not in library.envs.registration.ENV_REGISTRY:
            raise unknown_name("textarena has no game", id, library.envs.registration.ENV_REGISTRY)
        self._id, self._kwargs, self._num_players = id, dict(kwargs or {}), num_players
        self._train, self._is_whole = train, prompts == "whole"
        self._opponent = make_opponent(opponent, opponent_args or {}, is_whole=self._is_whole)
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
        seats = [self._seat(player, task, endpoint) for player in range(self._num_players)]
        trained = (task.player,) if self._train == "one" else range(self._num_players)
        num_turns, is_unfinished = 0, False
        while not game.is_done:
            player, text = game.observe()
            try:
                move = await seats[player].move(text, game)
            except NoRoom:
                is_unfinished = True
                break
            num_turns += player in trained
            game.step(move)
        return self._outcome(game, task, num_turns, is_unfinished)

    def _begin(self, task: Match) -> TextArenaGame:
        return TextArenaGame(
            self._id, self._kwargs, self._num_players, seed=task.seed, is_whole=self._is_whole
        )

    def _seat(self, player: int, task: Match, endpoint: Endpoint) -> Player:
        if self._opponent is not None and player != task.player:
            return self._opponent(player, task.seed)
        own = endpoint.branch(_branch(player))
        client = self._client.with_options(base_url=own.base_url, api_key=own.api_key)
        return ModelSeat(client, "policy", is_whole=self._is_whole, limits=LIMITS)

    def _outcome(
        self, game: TextArenaGame, task: Match, num_turns: int, is_unfinished: bool
    ) -> AgentOutcome:
        players = range(self._num_players)
        player = task.player if self._train == "one" else 0
        trained = {player} if self._train == "one" else set(players)
        shares = {_branch(each): 0.0 for each in players if each not in trained}
        if self._train == "both":
            shares = {_branch(1): -1.0}
        metrics = {"turns": float(num_turns), "unfinished": float(is_unfinished)}
        if is_unfinished:
            reward = self._unfinished_reward
            own = {_branch(each): reward for each in players} if self._train == "all" else {}
            return AgentOutcome(reward, metrics, shares, own)
        rewards, invalid = game.result()
        if self._train == "both" and rewards[0] != -rewards[1]:
            raise ValueError(
                f"{self._id} is no zero-sum game: it ended with {rewards[0]} and {rewards[1]}; "
                "use train = 'all'"
            )
        metrics["won"] = float(rewards[player] > 0)
        metrics["invalid"] = float(bool(invalid & trained))
        if self._train != "all":
            return AgentOutcome(rewards[player], metrics, shares)
        own = {_branch(each): rewards[each] for each in players}
        return AgentOutcome(statistics.fmean(own.values()), metrics, rewards=own)


def _branch(player: int) -> str:
    return f"player-{player}"
