"""The fields of journal records and their types; records that break these rules are rejected."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeAlias

from slipstream.protocol.bounds import shown

# A type; or a list of one type, for all elements; or a tuple with one type for each element.
_Expected: TypeAlias = type | UnionType | list[Any] | tuple[Any, ...]

_NUMBER = int | float
# Epochs are unsigned numbers of 64 bits, tasks and seeds signed ones.
_MOST = 2**64 - 1
_SERVER: Mapping[str, _Expected] = {"server": str, "epoch": int}
_TOKENS: _Expected = [(str, int, int)]
_GAPS: _Expected = [(str, int, (int, int, int, int, int))]

# The required fields that a resume reads, by the kind of the record.
_FIELDS: Mapping[str, Mapping[str, _Expected]] = {
    "start": dict(format=int, run_id=str),
    "lease": dict(
        group=str, environment=str, number=int, task=int, seed=int, deadline=int, **_SERVER
    ),
    "evaluation_lease": _SERVER,
    "end": dict(id=str),
    "gave_up": dict(group=str, members=[int]),
    "set_aside": dict(group=str),
    "closed": dict(group=str, how=str),
    "batch": dict(
        step=int, batch_id=str, crc32=int, groups=[str], trajectories=int, tokens=_TOKENS
    ),
    "batch_set_aside": dict(
        step=int,
        batch_id=str,
        by=str,
        groups=[(str, str, int)],
        put_back=[(str, str, int, int)],
        ids=[str],
        tokens=int,
        put_back_trajectories=int,
        put_back_tokens=_TOKENS,
    ),
    "step": dict(step=int, version=(int, int), digest=str, lags=[(int, int)], several=int),
    "servers": dict(generated=_TOKENS),
    "solved": dict(cause=str, step=int),
    "checkpoint": dict(version=(int, int)),
    "submitted": dict(environment=str, spec=str),
    "unsubmitted": dict(environment=str),
    "evaluation": dict(version=int, episodes=int, failed=int),
}
# Optional fields, by the kind of the record; an end has all of them or none.
_OPTIONAL: Mapping[str, Mapping[str, _Expected]] = {
    "start": dict(machine=dict, packages=dict),
    "queue": dict(added=int),
    "lease": dict(replaces=str),
    "end": dict(tokens=int, end=str, **_SERVER),
    "closed": dict(reward=_NUMBER, solved=bool),
    "servers": dict(departed=bool, judged=_TOKENS, settled=(int, int), gaps=_GAPS),
}


def check_fields(record: Mapping[str, Any]) -> None:
    """Raises ValueError if a field is missing or has a wrong type; accepts unknown kinds."""
    kind = record["kind"]
    for name, expected in _FIELDS.get(kind, {}).items():
        if name not in record:
            raise ValueError(f"{name} is missing")
        _check(name, record[name], expected)
    for name, expected in _OPTIONAL.get(kind, {}).items():
        if name in record:
            _check(name, record[name], expected)


def _check(name: str, value: object, expected: _Expected) -> None:
    if type(value) is int and abs(value) > _MOST:
        raise ValueError(f"{name} must fit 64 bits, got a number of {value.bit_length()} bits")
    if type(value) is expected:
        return
    if isinstance(expected, list | tuple):
        _check(name, value, list)
        assert isinstance(value, list)
        types = tuple(expected) * len(value) if isinstance(expected, list) else expected
        if len(value) != len(types):
            raise ValueError(f"{name} must have {len(types)} elements, got {len(value)}")
        for element, one in zip(value, types, strict=True):
            _check(f"an element of {name}", element, one)
    elif not isinstance(value, expected) or isinstance(value, bool) != (expected is bool):
        rule = getattr(expected, "__name__", str(expected))
        raise ValueError(f"{name} must be of type {rule}, got {shown(repr(value))}")
