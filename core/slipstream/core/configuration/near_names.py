"""Suggestions for an unknown name of a setting: pure functions."""

import difflib
from collections.abc import Iterable

_MOST = 3
# Also suggest names up to this factor farther away than the best match.
_ABOUT_AS_NEAR = 2.0


def near_names(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Returns up to three names of `known` that are most like `name`, the best first.

    Their similarity is at least `cutoff`, where 1 is the name itself, and about that of the best
    match: a typing error has one answer, half a name has several.
    """
    near = difflib.get_close_matches(name, known, n=_MOST, cutoff=cutoff)
    farthest = _ABOUT_AS_NEAR * _distance(name, near[0]) if near else 0.0
    return [other for other in near if _distance(name, other) <= farthest]


def did_you_mean(near: Iterable[str]) -> str:
    """Returns a question that names all of `near`, which must not be empty."""
    *others, last = (repr(name) for name in near)
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def _distance(name: str, other: str) -> float:
    # The order is that of difflib's get_close_matches, because the ratio is not symmetric.
    return 1.0 - difflib.SequenceMatcher(a=other, b=name).ratio()
