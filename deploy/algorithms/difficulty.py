"""Online difficulty filtering, a filter: groups that are neither too easy nor too hard.

Source: balanced filtering of arXiv:2504.03380.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from slipstream.learner.algorithms.episodes import RewardedEpisode

Share = Annotated[float, Field(ge=0, le=1)]


def filter(group: Sequence[RewardedEpisode], *, low: Share = 0.2, high: Share = 0.8) -> bool:
    """Returns whether the group's mean reward lies from `low` to `high`.

    For rewards 0 and 1 the mean is the share of right replies. A group in which no episode counts
    is left out.
    """
    rewards = [episode.reward for episode in group]
    return len(rewards) > 0 and low <= sum(rewards) / len(rewards) <= high
