"""Computes the digest of an environment's tasks, by which processes and starts compare them."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

from slipstream.client.environment import TaskSource

# Tasks of a list that a digest reads, evenly spaced; of a sequence that may have to load each one,
# and of an iterator.
MAX_LISTED, MAX_LOADED = 4096, 16


def digest_of(tasks: TaskSource[Any]) -> str:
    """Returns a digest of number, order and content of tasks, or "" if one cannot be read.

    Objects other than values of JSON, dataclasses, sets and arrays count by their type alone.
    """
    digest = hashlib.sha256(str(tasks.num_tasks).encode())
    most = MAX_LISTED if tasks.is_listed else MAX_LOADED
    try:
        for place in spaced(tasks.num_tasks or MAX_LOADED, most):
            digest.update(_text(tasks[place]).encode(errors="surrogatepass"))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001
        # The episode of such a task fails with the cause.
        print(f"a task cannot be read: {error!r}", file=sys.stderr)
        return ""
    return digest.hexdigest()[:32]


def spaced(number: int, most: int) -> Sequence[int]:
    """Returns at most `most` of the indices below `number`, evenly spaced, with first and last."""
    if number <= most:
        return range(number)
    return [place * (number - 1) // max(most - 1, 1) for place in range(most)]


def _text(value: object) -> str:
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        # A key that is no text, or an object that contains itself.
        return _name(value)


def _plain(value: object) -> object:
    """Returns what JSON can write in place of `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_name(value), {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}]
    if isinstance(value, Mapping):
        return [[_text(key), _text(each)] for key, each in value.items()]
    if isinstance(value, Set):
        # The order of a set differs between processes.
        return sorted(map(_text, value))
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    listed = getattr(value, "tolist", None)
    return listed() if callable(listed) else _name(value)


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
