"""MaxRL, an advantage: the reward relative to the group's mean (arXiv:2602.02710)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode


def advantage(episodes: Sequence[ScoredEpisode]) -> FloatArray:
    """Returns (r - mean) / mean of the group, and 0 in groups without a reward.

    For rewards 0 and 1 its gradient approaches that of the logarithm of the share of right replies,
    so tasks that are seldom solved count for more. Rewards below 0 have no such meaning.
    """
    rewards = np.array([e.reward - e.token_costs.sum() for e in episodes], dtype=np.float64)
    if (rewards < 0).any():
        raise ValueError(f"MaxRL needs rewards of 0 or more, got {rewards.min()}")
    _, groups = np.unique([episode.group_id for episode in episodes], return_inverse=True)
    means = (np.bincount(groups, rewards) / np.bincount(groups))[groups]
    return np.divide(rewards - means, means, out=np.zeros_like(rewards), where=means > 0)
