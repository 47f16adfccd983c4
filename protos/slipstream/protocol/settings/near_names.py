"""What an unknown name of a setting may have been meant to be: pure functions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 3
# So many times as far from the name as the best one may others be that are named beside it.
_ABOUT_AS_NEAR = 2.0


def near_names(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Those of `known` that are most like `name`, the best first: three at most, or none.

    From `cutoff` on, where 1 is the name itself, and only those that are about as near as the best:
    a slip of the pen has one answer, half a name several.
    """
    near = difflib.get_close_matches(name, known, n=_MOST, cutoff=cutoff)
    farthest = _ABOUT_AS_NEAR * _distance(name, near[0]) if near else 0.0
    return [other for other in near if _distance(name, other) <= farthest]


def did_you_mean(near: Iterable[str]) -> str:
    """The question that names them all; there is one at least."""
    *others, last = (repr(name) for name in near)
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def _distance(name: str, other: str) -> float:
    # In the order in which difflib compares them: it is not symmetric.
    return 1.0 - difflib.SequenceMatcher(a=other, b=name).ratio()
