"""The built-in filters, which choose the groups that are trained: pure functions."""

import math
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
    rewards: dict[str, list[float]] = defaultdict(list)
    for episode in group:
        rewards[episode.side].append(episode.reward)
    # Sums of the same numbers in another order differ in their last bits.
    return any(not math.isclose(min(side), max(side), abs_tol=1e-12) for side in rewards.values())
