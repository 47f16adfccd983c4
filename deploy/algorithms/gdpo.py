"""GDPO, an advantage: each of several rewards is normalised by itself (arXiv:2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode

# Added to deviations.
EPSILON = 1e-6


def advantage(
    episodes: Sequence[ScoredEpisode],
    *,
    metrics: tuple[str, ...] = (),
    weights: tuple[float, ...] = (),
) -> FloatArray:
    """Returns the weighted sum of normalised rewards, normalised once more over the batch.

    The rewards are the environment's and its `metrics` of these names, which each episode must
    have. Each is normalised in its group: less the mean, over the deviation. A reward that a group
    has in common adds nothing there, and a reward on a larger scale no more than others. `weights`
    has a number for the reward and for each metric, by default 1.
    """
    if weights and len(weights) != 1 + len(metrics):
        raise ValueError(f"weights must be {1 + len(metrics)} numbers, got {len(weights)}")
    factors = weights or (1.0,) * (1 + len(metrics))
    group_ids = np.array([episode.group_id for episode in episodes])
    columns = [
        [episode.reward - episode.token_costs.sum() for episode in episodes],
    ]
    for name in metrics:
        column = [episode.metrics[name] for episode in episodes]
        columns.append(column)
    total = np.zeros(len(episodes))
    for factor, column in zip(factors, columns, strict=True):
        rewards = np.array(column, dtype=np.float64)
        for group_id in np.unique(group_ids):
            members = group_ids == group_id
            normalised = _normalised(rewards[members])
            total[members] += factor * normalised
    return _normalised(total)


def _normalised(values: FloatArray) -> FloatArray:
    if not len(values):
        return values
    centred = values - values.mean()
    # A rounding error of equal values is no difference.
    rounding = 1e-12 * np.abs(values).max()
    centred[np.abs(centred) <= rounding] = 0.0
    variance = np.mean(centred**2)
    normalised: FloatArray = centred / (np.sqrt(variance) + EPSILON)
    return normalised
