"""How much of the time generation, training and both were busy. Pure arithmetic on intervals."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from slipstream.learner.controller.records.busy_seconds import BusySeconds

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


def include(merged: list[Interval], interval: Interval) -> None:
    """Adds an interval to the result of `union`: many servers' heartbeats become few intervals."""
    start, end = interval
    if end <= start:
        return
    first = bisect.bisect_left(merged, start, key=lambda each: each[1])
    last = bisect.bisect_right(merged, end, key=lambda each: each[0])
    touched = merged[first:last]
    if touched:
        start, end = min(start, touched[0][0]), max(end, touched[-1][1])
    merged[first:last] = [(start, end)]


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


def busy_seconds(
    generation: Iterable[Interval], training: Iterable[Interval], window: Interval
) -> BusySeconds:
    """How much of `window` lies in the intervals; nothing when it ends before it begins."""
    if window[1] <= window[0]:
        return BusySeconds()
    generated = intersection(union(generation), [window])
    trained = intersection(union(training), [window])
    return BusySeconds(
        window[1] - window[0],
        length(generated),
        length(trained),
        length(intersection(generated, trained)),
    )


class BusyMeter:
    """Adds up how busy a run was, from its first generation to the end of its last step.

    Between two starts of a run it is not watched.
    """

    def __init__(self) -> None:
        # Of earlier starts, and of this one as far as it is settled.
        self.earlier = BusySeconds()
        self._settled = BusySeconds()
        self._generation: list[Interval] = []
        self._training: list[Interval] = []
        self._from_s: float | None = None
        self._until_s = 0.0

    def generated(self, intervals: Sequence[Interval]) -> None:
        """An engine was busy; a server may report it late."""
        if self._from_s is None and intervals:
            self._from_s = intervals[0][0]
        for interval in intervals:
            include(self._generation, interval)

    def trained(self, interval: Interval) -> None:
        """A step was made."""
        self._training.append(interval)
        self._until_s = interval[1]

    def settle(self, until_s: float) -> None:
        """Counts what lies before `until_s` for good: what is reported of it later has no effect.

        Keeps the number of intervals small in long runs.
        """
        until_s = min(until_s, self._until_s)
        if self._from_s is None or until_s <= self._from_s:
            return
        self._settled += busy_seconds(self._generation, self._training, (self._from_s, until_s))
        self._from_s = until_s
        rest = [(until_s, math.inf)]
        self._generation = intersection(union(self._generation), rest)
        self._training = intersection(union(self._training), rest)

    def of_this_start(self) -> BusySeconds:
        """From the first generation of this start to the end of its last step."""
        if self._from_s is None:
            return self._settled
        window = (self._from_s, self._until_s)
        return self._settled + busy_seconds(self._generation, self._training, window)

    def of_the_run(self) -> BusySeconds:
        """Of all starts together."""
        return self.earlier + self.of_this_start()
