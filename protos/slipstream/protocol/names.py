"""Names that become parts of paths and lines of others."""

from __future__ import annotations

import re

from slipstream.protocol.errors import ConfigError

_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_server_id(name: str) -> bool:
    """Whether a rollout server may have this id."""
    return _SERVER_ID.fullmatch(name) is not None


def check_server_id(name: str) -> str:
    """The name of a rollout server itself; ConfigError for one that could not be a file's."""
    if not is_server_id(name):
        raise ConfigError(
            "the id of a rollout server has up to 100 letters, digits, '.', '_' and '-', "
            f"got {name[:100]!r}"
        )
    return name
