"""How much of the time generation, training and both were busy. Pure arithmetic on intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time that lies in both; each is disjoint and in order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def busy_shares(
    generation: Iterable[Interval], training: Iterable[Interval], window: Interval
) -> dict[str, float]:
    """Shares of `window` in which generation, training and both were busy, between 0 and 1."""
    span = window[1] - window[0]
    if span <= 0:
        return {"generation": 0.0, "training": 0.0, "both": 0.0}
    generated = intersection(union(generation), [window])
    trained = intersection(union(training), [window])
    return {
        "generation": length(generated) / span,
        "training": length(trained) / span,
        "both": length(intersection(generated, trained)) / span,
    }
