"""Checks ids of rollout servers, and suggests known names in place of an unknown one."""

import difflib
import re
from collections.abc import Iterable

from slipstream.core.errors import ConfigError

_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_server_id(name: str) -> bool:
    """Whether a rollout server may have the id `name`."""
    return _SERVER_ID.fullmatch(name) is not None


def check_server_id(name: str) -> str:
    """Returns `name`, the id of a rollout server. Raises ConfigError if the id is not allowed."""
    if not is_server_id(name):
        raise ConfigError(
            "the id of a rollout server has up to 100 letters, digits, '.', '_' and '-', "
            f"got {name[:100]!r}"
        )
    return name


def near_names(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Returns up to three names of `known` that are most like `name`, the best first.

    The similarity of each is at least `cutoff`, where 1 means equal. Names that differ more than
    twice as much as the best one are left out, so that a typing error usually has one suggestion.
    """

    def distance(other: str) -> float:
        return 1 - difflib.SequenceMatcher(None, other, name).ratio()

    near = difflib.get_close_matches(name, known, cutoff=cutoff)
    return [other for other in near if distance(other) <= 2 * distance(near[0])]


def did_you_mean(near: Iterable[str]) -> str:
    """Returns a question that names all of `near`, which must not be empty."""
    *others, last = (repr(name) for name in near)
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
