"""An advantage that compares an episode with the median of its group."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from slipstream.learner.algorithms.advantages import score
from slipstream.learner.algorithms.episodes import FloatArray, ScoredEpisode


def group_median(episodes: Sequence[ScoredEpisode], *, scale: float) -> FloatArray:
    """Returns each score less its group's median, times `scale`."""
    advantages = score(episodes)
    groups: dict[str, list[int]] = defaultdict(list)
    for index, episode in enumerate(episodes):
        groups[episode.group_id].append(index)
    for members in groups.values():
        advantages[members] -= np.median(advantages[members])
    return scale * advantages
