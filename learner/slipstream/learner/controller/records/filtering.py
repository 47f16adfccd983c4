"""Groups that dynamic sampling leaves out, and what many of them in a row say about the tasks.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    """What the groups that were left out while one batch was formed mean for the run."""

    # Too few were left out to tell.
    GO_ON = "go on"
    # Every one of them had full rewards: nothing is left to learn.
    SOLVED = "solved"
    # So many have equal rewards that no batch comes together, and not because they are full.
    STUCK = "stuck"


@dataclass
class Tally:
    """The groups of one environment."""

    groups: int = 0
    # Those of which every episode has the full reward.
    solved: int = 0
    # Sum over the groups of the mean reward of their episodes.
    reward_sum: float = 0.0


@dataclass
class FilteredGroups:
    """What was left out since the last batch, by environment."""

    tallies: dict[str, Tally] = field(default_factory=dict)

    def add(self, environment: str, reward_mean: float, *, solved: bool) -> None:
        """Counts one more group."""
        tally = self.tallies.setdefault(environment, Tally())
        tally.groups += 1
        tally.solved += solved
        tally.reward_sum += reward_mean

    def clear(self) -> None:
        """The batch is formed."""
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
        """Numbers of each environment, as text."""
        return "; ".join(
            f"{name}: {tally.solved} of {tally.groups} solved, mean reward "
            f"{tally.reward_sum / tally.groups:.3g}"
            for name, tally in sorted(self.tallies.items())
        )


def is_solved(rewards: Iterable[float], solved_reward: float) -> bool:
    """Whether each episode of a group has the full reward or more."""
    return all(reward >= solved_reward for reward in rewards)
