"""The players of a game: a model behind an OpenAI API, an agent of textarena, or chance.

`make_opponent` makes the one that a configuration names.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import key_in, openai_client
from slipstream.environments.frameworks.packages import import_function
from slipstream.environments.frameworks.textarena_game import TextArenaGame

if TYPE_CHECKING:
    import openai

# Errors with which an endpoint of the run says that one of its limits is reached.
LIMITS = frozenset({"max_turns_exceeded", "max_branches_exceeded", "context_length_exceeded"})


class NoRoom(Exception):
    """A limit of the run leaves no room for another reply."""


class Player(Protocol):
    """One player of one game."""

    async def move(self, text: str, game: TextArenaGame) -> str:
        """Returns the player's next move; `text` is what the player reads."""


class ModelSeat:
    """A model that reads `text` as the next message of a conversation, or as all of one."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        *,
        is_whole: bool,
        limits: frozenset[str] = frozenset(),
    ) -> None:
        """`limits` are errors of the API that mean NoRoom."""
        self._client, self._model = client, model
        self._is_whole, self._limits = is_whole, limits
        self._messages: list[Any] = []

    async def move(self, text: str, game: TextArenaGame) -> str:
        """Asks the model; raises NoRoom, or another error of the API."""
        import openai

        before = [] if self._is_whole else self._messages
        self._messages = [*before, {"role": "user", "content": text}]
        try:
            answer = await self._client.chat.completions.create(
                model=self._model, messages=self._messages
            )
        except openai.BadRequestError as error:
            if error.code in self._limits:
                raise NoRoom from error
            raise
        reply = answer.choices[0].message
        self._messages.append(reply)
        return reply.content or ""


class AgentSeat:
    """An agent as textarena knows them, which reads the whole game at each turn; it may block."""

    def __init__(self, agent: Callable[[str], str], player: int, *, is_whole: bool) -> None:
        self._agent, self._player = agent, player
        self._is_whole = is_whole
        self._heard = ""

    async def move(self, text: str, game: TextArenaGame) -> str:
        """Asks the agent, in a thread."""
        self._heard = text if self._is_whole else f"{self._heard}\n{text}".strip()
        move = str(await asyncio.to_thread(self._agent, self._heard))
        # What is new to a player leaves its own moves out.
        self._heard += f"\n[Player {self._player}] {move}"
        return move


class RandomSeat:
    """A player that takes any legal move of those that the newest text lists in [ ]."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._options = ""

    async def move(self, text: str, game: TextArenaGame) -> str:
        """Returns a legal move. Raises ValueError when the game lists none."""
        for options in (text, self._options):
            for move in game.legal_moves(options, self._chance):
                self._options = options
                return move
        raise ValueError(
            "opponent = 'random' finds no legal move in what the game shows: take another opponent"
        )


SELF = "self"
RANDOM = "random"
# Seconds for one reply of an opponent.
REPLY_LIMIT_S = 120.0
REPLY_RETRIES = 2
MAX_REPLY_BYTES = 4 << 20

# Makes the seat of a player in the game of a seed.
Opponent: TypeAlias = Callable[[int, int], Player]


def make_opponent(name: str, args: Mapping[str, Any], *, is_whole: bool) -> Opponent | None:
    """Returns what plays against the model; None if the model does that itself.

    `args` are for an agent's class, or `model` and `key_file` of an API. Raises ConfigError, which
    names what cannot work.
    """
    if name in (SELF, RANDOM):
        if args:
            raise ConfigError(f"opponent_args are for an URL or a class, got opponent = {name!r}")
        return (lambda player, seed: RandomSeat(f"{seed} {player}")) if name == RANDOM else None
    if name.startswith(("http://", "https://")):
        return _api(name, dict(args), is_whole=is_whole)
    if ":" not in name:
        raise ConfigError(
            f"opponent must be 'self', 'random', an URL or module:class, got {name!r}"
        )
    make_agent = import_function("opponent", name)
    try:
        agent = make_agent(**args)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"opponent {name}: {error}") from error
    return lambda player, seed: AgentSeat(agent, player, is_whole=is_whole)


@dataclass(frozen=True)
class _Api:
    """A model behind an API; one client serves all games."""

    client: openai.AsyncOpenAI
    model: str
    is_whole: bool

    def __call__(self, player: int, seed: int) -> Player:
        """Makes the seat of a player."""
        return ModelSeat(self.client, self.model, is_whole=self.is_whole)


def _api(url: str, args: dict[str, Any], *, is_whole: bool) -> Opponent:
    model, key_file = args.pop("model", None), args.pop("key_file", None)
    if not model or args:
        raise ConfigError(
            f"opponent_args of an URL are model and perhaps key_file, got {[*args] or 'no model'}"
        )
    client = openai_client(
        url,
        api_key=key_in(key_file, "key_file"),
        timeout_s=REPLY_LIMIT_S,
        max_retries=REPLY_RETRIES,
        most_bytes=MAX_REPLY_BYTES,
    )
    return _Api(client, model, is_whole)
