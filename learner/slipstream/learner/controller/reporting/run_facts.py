"""The facts of a run's summary: counts, sums, busy times and resources, and its end."""

import bisect
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from slipstream.learner.controller.records.history import BusySeconds

Interval = tuple[float, float]

# Stages of the trainer whose seconds are summed over all steps.
STAGES = ("training", "waiting", "publish", "export")
# Values of which the largest of all steps counts.
PEAKS = ("trainer_rss_bytes", "gpu_reserved_bytes", "rollout_rss_bytes")
# Seconds over which the rate is a mean: heartbeats are too coarse for a single step.
WINDOW_S = 5.0
EDGE_STEPS = 5


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


class RunResources:
    """Totals and peaks over the steps that were added."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys((*(f"{stage}_s" for stage in STAGES), "model_flops"), 0.0)
        self._peaks: dict[str, float] = {}
        self._servers = 0

    def add(self, row: Mapping[str, float]) -> None:
        """Adds the row of one step."""
        for name in self._totals:
            value = row.get(name, 0.0)
            self._totals[name] += 0.0 if math.isnan(value) else value
        for name in PEAKS:
            # The comparison leaves out numbers that are none.
            if (value := row.get(name, math.nan)) >= self._peaks.get(name, 0.0):
                self._peaks[name] = value
        if (servers := row.get("servers_serving", 0.0)) > self._servers:
            self._servers = int(servers)

    def told(self, *, trainer_ranks: int) -> dict[str, JsonValue]:
        """The numbers by name, without peaks that no row had."""
        return {
            "trainer_ranks": trainer_ranks,
            "rollout_servers": self._servers,
            **self._totals,
            **self._peaks,
        }


class GenerationRate:
    """Generated tokens per second over the last `WINDOW_S`, since this start's first generation."""

    def __init__(self) -> None:
        # Tokens that earlier starts of the run generated.
        self.earlier = 0
        # (time, tokens generated by then): the points in the window, and the last point before it.
        self._points: deque[tuple[float, int]] = deque()

    def began(self, at_s: float) -> None:
        """Notes that an engine was busy from `at_s` on; only the first call counts."""
        if not self._points:
            self._points.append((at_s, self.earlier))

    def at(self, now_s: float, generated: int) -> float:
        """The rate when the whole run has `generated` tokens. 0 before the first generation."""
        if not self._points:
            return 0.0
        self._points.append((now_s, generated))
        while len(self._points) > 2 and now_s - self._points[1][0] >= WINDOW_S:
            self._points.popleft()
        then_s, before = self._points[0]
        return (generated - before) / max(now_s - then_s, 1e-9)


@dataclass
class RunFacts:
    """Counts and sums of a run, restored from the journal, or from rows if it lacks them."""

    # Number of the newest version that was made.
    steps: int = 0
    first_rewards: list[float] = field(default_factory=list)
    last_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=EDGE_STEPS))
    resources: RunResources = field(default_factory=RunResources)
    lag_counts: Counter[int] = field(default_factory=Counter)
    with_several_versions: int = 0
    gap_sum: float = 0.0
    gap_tokens: float = 0.0
    gap_max: float = 0.0
    gradient_overflows: int = 0
    busy: BusyMeter = field(default_factory=BusyMeter)

    def edge_rewards(self) -> tuple[list[float], list[float]]:
        """Returns the mean rewards of the first and of the last steps, without a step in both."""
        num_edge = max(1, min(EDGE_STEPS, self.steps // 2))
        return self.first_rewards[:num_edge], list(self.last_rewards)[-num_edge:]

    def count_row(self, row: Mapping[str, float]) -> None:
        """Takes the numbers of the row of a step that count for the run."""
        self.resources.add(row)
        self.gradient_overflows += int(row.get("gradient_overflows", 0))
        self.last_rewards.append(row["reward_mean"])
        if len(self.first_rewards) < EDGE_STEPS:
            self.first_rewards.append(row["reward_mean"])
        tokens, mean, most = (
            row.get(f"logprob_gap_{name}", math.nan) for name in ("tokens", "mean", "max")
        )
        # A step without tokens of the newest version has none of the three.
        if not math.isnan(tokens + mean + most):
            self.gap_sum += mean * tokens
            self.gap_tokens += tokens
            self.gap_max = max(self.gap_max, most)


@dataclass(frozen=True)
class Ending:
    """The end of a run, for its summary."""

    # "finished", "stopped" or "failed".
    state: str
    cause: str
    # Whether the run finished before its last configured step because nothing is left to learn.
    solved: bool
    # The cause of each suspended training environment, by name.
    suspended_environments: dict[str, str]
