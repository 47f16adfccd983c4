"""The built-in filters, which choose the groups that are trained: pure functions."""

import math
from collections import defaultdict
from collections.abc import Sequence

from slipstream.learner.algorithms.episodes import RewardedEpisode


def none(group: Sequence[RewardedEpisode]) -> bool:
    """Returns true: every group is trained."""
    return True


def unequal_rewards(group: Sequence[RewardedEpisode]) -> bool:
    """Whether the environment's rewards differ within at least one side of a group's episodes.

    A penalty makes no difference: answers that are all wrong at different lengths teach lengths
    alone. Source: dynamic sampling of DAPO (arXiv:2503.14476, section 3.2), which leaves out groups
    whose answers are all right or all wrong.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for episode in group:
        rewards[episode.side].append(episode.reward)
    # Sums of the same numbers in another order differ in their last bits.
    return any(not math.isclose(min(side), max(side), abs_tol=1e-12) for side in rewards.values())
