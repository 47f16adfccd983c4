"""The first line of the settings that a run writes into its folder: are they whole?

A file that was cut may be TOML still, and what it lost would be defaults.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from slipstream.core.errors import ConfigError

_PREFIX = b"# Settings of a run"
_FIRST_LINE = re.compile(rb"# Settings of a run: (\d+) bytes, BLAKE2b ([0-9a-f]{32});[^\n]*\n")
REMEDY = "put it back from a copy of the run"


def with_first_line(text: str) -> bytes:
    """The file that holds `text` and says of itself what it holds."""
    data = text.encode()
    told = f"{len(data)} bytes, BLAKE2b {_digest(data)}; remove this line when you change one below"
    return _PREFIX + f": {told}\n".encode() + data


def check_whole(path: Path, data: bytes) -> None:
    """Raises ConfigError when the settings below the first line are not those that it tells of.

    Files without such a line are those of users, and pass unless they are empty.
    """
    if not data.strip():
        raise ConfigError(f"{path} is empty: {REMEDY}, or write settings into it")
    if not data.startswith(_PREFIX):
        return
    first = _FIRST_LINE.match(data)
    if first is None or first[2].decode() != _digest(data[first.end() :]):
        raise ConfigError(
            f"{path} is not what the run wrote, by the digest in its first line: {REMEDY}, or "
            "remove that line if the change was meant"
        )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
