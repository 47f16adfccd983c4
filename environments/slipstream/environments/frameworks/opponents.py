"""The opponents that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import key_in, openai_client
from slipstream.environments.frameworks.packages import import_function
from slipstream.environments.frameworks.seats import AgentSeat, ModelSeat, RandomSeat, Seat

if TYPE_CHECKING:
    import openai

SELF = "self"
RANDOM = "random"
# Seconds for one reply of an opponent.
REPLY_LIMIT_S = 120.0
REPLY_RETRIES = 2
MAX_REPLY_BYTES = 4 << 20

# Makes the seat of a player in the game of a seed.
Opponent: TypeAlias = Callable[[int, int], Seat]


def make_opponent(name: str, args: Mapping[str, Any], *, is_whole: bool) -> Opponent | None:
    """Returns what plays against the model; None if the model does that itself.

    `args` are for an agent's class, or `model` and `key_file` of an API. ConfigError names what
    cannot work.
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

    def __call__(self, player: int, seed: int) -> Seat:
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
