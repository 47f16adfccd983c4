"""Rules for names that become parts of paths and lines, and a question for unknown ones."""

import re
from collections.abc import Iterable

from slipstream.core.errors import ConfigError

_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_server_id(name: str) -> bool:
    """Whether a rollout server may have this id."""
    return _SERVER_ID.fullmatch(name) is not None


def check_server_id(name: str) -> str:
    """Returns `name`.

    Raises ConfigError for a rollout server's id that could not be a file's name.
    """
    if not is_server_id(name):
        raise ConfigError(
            "the id of a rollout server has up to 100 letters, digits, '.', '_' and '-', "
            f"got {name[:100]!r}"
        )
    return name


def did_you_mean(near: Iterable[str]) -> str:
    """Returns a question that names all of `near`, which must not be empty."""
    *others, last = (repr(name) for name in near)
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
