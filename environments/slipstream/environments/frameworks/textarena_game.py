"""One game of textarena with random numbers of its own, kept off the network."""

import contextlib
from collections.abc import Mapping
from typing import Any, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.splits import Chance

# Folders of nltk's data in which the resources lie that games ask for.
NLTK_FOLDERS = ("corpora", "taggers", "tokenizers")

# A message of textarena: sender, text, kind.
Heard: TypeAlias = tuple[int, str, Any]
# An environment of textarena, perhaps within wrappers.
Game: TypeAlias = Any


class TextArenaGame:
    """make -> observe() -> step() -> ... until `is_done` -> result().

    Each game draws from random numbers of its own: games side by side do not change each other's.
    """

    def __init__(self, id: str, kwargs: Mapping[str, Any], num_players: int, *, seed: int) -> None:
        """Raises ConfigError, which names what keeps the game from beginning."""
        import textarena

        self._kinds = textarena.ObservationType
        self._chance = Chance(seed)
        self.is_done = False
        with self._chance.in_use():
            try:
                self._game = textarena.make(id, **kwargs)
                self._game.reset(num_players=num_players, seed=seed)
            except SyntaxError as error:
                raise ConfigError(
                    f"game {id!r} is written in a newer Python: {error.msg} "
                    f"({error.filename}:{error.lineno})"
                ) from error
            except (AssertionError, ImportError, OSError, TypeError, ValueError) as error:
                raise ConfigError(f"game {id!r}: {' '.join(str(error).split())}") from error

    def observe(self) -> tuple[int, str]:
        """Returns the player whose turn it is, and what that player has not read yet."""
        innermost = self._game
        while "env" in vars(innermost):
            innermost = innermost.env
        with self._chance.in_use():
            player, heard = innermost.get_observation()
        return player, self._text(player, heard)

    def step(self, move: str) -> None:
        """Plays a move of the player whose turn it is."""
        with self._chance.in_use():
            self.is_done, _ = self._game.step(action=move)

    def result(self) -> tuple[dict[int, float], set[int]]:
        """Returns the rewards by player, and who lost by an invalid move."""
        with self._chance.in_use():
            rewards, facts = self._game.close()
        invalid = {player for player, each in facts.items() if each.get("invalid_move")}
        return {player: float(reward) for player, reward in rewards.items()}, invalid

    def _text(self, player: int, heard: list[Heard]) -> str:
        roles = self._game.state.role_mapping
        lines = [
            f"[{'GAME' if sender < 0 else roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in heard
            if not (sender == player and kind == self._kinds.PLAYER_ACTION)
        ]
        return "\n".join(lines) or "It is your turn."


def keep_off_the_network() -> None:
    """Makes games use nltk's data as they lie on the disk.

    Games call nltk.download() when they are imported or made. Without a network that waits for as
    long as the network lets it. ConfigError in its place names the data that are missing.
    """
    try:
        import nltk
    except ModuleNotFoundError:
        # textarena needs it, and says so.
        return

    def is_here(path: str) -> bool:
        for each in (path, f"{path}.zip"):
            with contextlib.suppress(LookupError):
                nltk.data.find(each)
                return True
        return False

    def find(resources: str | list[str], *_: object, **__: object) -> bool:
        for name in [resources] if isinstance(resources, str) else resources:
            if not any(is_here(f"{folder}/{name}") for folder in NLTK_FOLDERS):
                raise ConfigError(f"the game needs data of nltk: python -m nltk.downloader {name}")
        return True

    nltk.download = find
