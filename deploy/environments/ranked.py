"""Replies that are compared with each other: a group is ranked, and no reply has a score."""

from collections.abc import Sequence

from slipstream.client.environment import FinishedEpisode, StepResult
from slipstream.environments.echo import Echo


class Ranked(Echo):
    """Asks for the letters of `Echo`; a reply earns the share of its group's others that it beats.

    A tie counts half. In an evaluation, where each reply is alone, it earns what `Echo` gives.
    """

    def step(self, reply: str) -> StepResult:
        """Returns no reward; how close the reply is, only `judge_group` looks at."""
        closeness = super().step(reply).reward
        return StepResult(metrics={"closeness": closeness})

    def judge_group(self, episodes: Sequence[FinishedEpisode]) -> list[float]:
        """Returns for each episode the share of the others that it beats."""
        closeness = [episode.metrics["closeness"] for episode in episodes]
        if len(closeness) == 1:
            return closeness
        return [_share_beaten(mine, closeness) for mine in closeness]


def _share_beaten(mine: float, group: Sequence[float]) -> float:
    beaten = sum(other < mine for other in group)
    # The reply is among those that are as good.
    ties = group.count(mine) - 1
    return (beaten + ties / 2) / (len(group) - 1)
