"""Groups that dynamic sampling leaves out, and the verdict when many of them come in a row.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    """The consequence, for the run, of the groups left out while one batch was formed."""

    # Too few groups were left out to judge.
    GO_ON = "go on"
    # Every group that was left out had full rewards: nothing is left to learn.
    SOLVED = "solved"
    # Too many groups had equal rewards that were not full: no batch comes together.
    STUCK = "stuck"


@dataclass
class Tally:
    """Counts of the groups of one environment that were left out."""

    groups: int = 0
    # Number of groups in which every episode has the full reward.
    solved: int = 0
    # Sum over the groups of the mean reward of their episodes.
    reward_sum: float = 0.0


@dataclass
class FilteredGroups:
    """The groups that were left out since the last batch, counted by environment."""

    tallies: dict[str, Tally] = field(default_factory=dict)

    def add(self, environment: str, reward_mean: float, *, solved: bool) -> None:
        """Counts one more group."""
        tally = self.tallies.setdefault(environment, Tally())
        tally.groups += 1
        tally.solved += solved
        tally.reward_sum += reward_mean

    def clear(self) -> None:
        """Starts the counts again once a batch is formed."""
        self.tallies.clear()

    @property
    def total(self) -> int:
        """Number of groups."""
        return sum(tally.groups for tally in self.tallies.values())

    def verdict(self, limit: int) -> Verdict:
        """Decides when `limit` groups were left out while one batch was formed.

        One group that is not solved is enough for STUCK: the run has not learnt that task.
        """
        if self.total < limit:
            return Verdict.GO_ON
        solved = all(tally.solved == tally.groups for tally in self.tallies.values())
        return Verdict.SOLVED if solved else Verdict.STUCK

    def describe(self) -> str:
        """The numbers of each environment, as text."""
        return "; ".join(
            f"{name}: {tally.solved} of {tally.groups} solved, mean reward "
            f"{tally.reward_sum / tally.groups:.3g}"
            for name, tally in sorted(self.tallies.items())
        )


def is_solved(rewards: Iterable[float], solved_reward: float) -> bool:
    """Whether each episode of a group has the full reward or more."""
    return all(reward >= solved_reward for reward in rewards)
