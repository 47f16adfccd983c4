"""The built-in filters, which choose the groups that are trained: pure functions."""

from collections import defaultdict
from collections.abc import Sequence

from slipstream.learner.algorithms.episodes import RewardedEpisode


def none(group: Sequence[RewardedEpisode]) -> bool:
    """Returns true: every group is trained."""
    return True


def unequal_rewards(group: Sequence[RewardedEpisode]) -> bool:
    """Whether the rewards of a group differ within at least one side of its episodes.

    Source: dynamic sampling of DAPO (arXiv:2503.14476, section 3.2), which leaves out groups of
    equal rewards.
    """
    rewards: dict[str, set[float]] = defaultdict(set)
    for episode in group:
        rewards[episode.side].add(episode.reward)
    return any(len(different) > 1 for different in rewards.values())
