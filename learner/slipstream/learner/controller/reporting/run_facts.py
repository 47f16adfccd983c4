"""The facts of a run's summary: counts and sums over the run, and its end."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.learner.controller.reporting.busy import BusyMeter
from slipstream.learner.controller.reporting.resources import RunResources

EDGE_STEPS = 5


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
        """Takes mean reward, log-probability gap and overflows from the row of a step."""
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
