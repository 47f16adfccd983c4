"""The players of a game: a model behind an OpenAI API, an agent of textarena, or chance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.environments.frameworks.textarena_game import TextArenaGame

if TYPE_CHECKING:
    import openai

# Errors with which an endpoint of the run says that one of its limits is reached.
LIMITS = frozenset({"max_turns_exceeded", "max_branches_exceeded", "context_length_exceeded"})


class NoRoom(Exception):
    """A limit of the run leaves no room for another reply."""


class Seat(Protocol):
    """One player of one game."""

    async def move(self, text: str, game: TextArenaGame) -> str:
        """Returns the player's next move; `text` is what the player reads."""
        ...


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
        """Returns a legal move; ValueError when the game lists none."""
        for options in (text, self._options):
            for move in game.legal_moves(options, self._chance):
                self._options = options
                return move
        raise ValueError(
            "opponent = 'random' finds no legal move in what the game shows: take another opponent"
        )
