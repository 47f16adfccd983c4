"""The busy times of generation, training and both. Pure arithmetic on intervals."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from slipstream.learner.controller.records.busy_seconds import BusySeconds

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time of all intervals as disjoint intervals in order."""
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
    """Adds an interval to the result of `union`, in place; merges it with those that it touches."""
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
    """The time that lies in both `left` and `right`, which are disjoint and in order each."""
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
    """The seconds of `window` that lie in the intervals; all 0 when it ends before it begins."""
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
    """Adds up the busy seconds of a run, from its first generation to the end of its last step.

    The time between two starts of a run does not count.
    """

    def __init__(self) -> None:
        # Busy seconds of earlier starts; busy seconds of this start before `_from_s`.
        self.earlier = BusySeconds()
        self._settled = BusySeconds()
        self._generation: list[Interval] = []
        self._training: list[Interval] = []
        self._from_s: float | None = None
        self._until_s = 0.0

    def generated(self, intervals: Sequence[Interval]) -> None:
        """Notes the busy intervals of an engine, which a server may report late."""
        if self._from_s is None and intervals:
            self._from_s = intervals[0][0]
        for interval in intervals:
            include(self._generation, interval)

    def trained(self, interval: Interval) -> None:
        """Notes the interval of a step of the trainer."""
        self._training.append(interval)
        self._until_s = interval[1]

    def settle(self, until_s: float) -> None:
        """Counts the time before `until_s` for good: later reports on that time have no effect.

        This keeps the number of intervals small in long runs.
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
        """Busy seconds from the first generation of this start to the end of its last step."""
        if self._from_s is None:
            return self._settled
        window = (self._from_s, self._until_s)
        return self._settled + busy_seconds(self._generation, self._training, window)

    def of_the_run(self) -> BusySeconds:
        """Busy seconds of all starts together."""
        return self.earlier + self.of_this_start()
